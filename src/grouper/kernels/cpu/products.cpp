// Products of a few hundred rows of bf16 with weights, by the processor's matrix unit.
//
// The unit multiplies tiles of 16 rows of 64 bytes. A weight is laid out once in panels of 32
// columns: steps of 32 along k, each of two tiles as the unit wants them. A thread takes a run of
// panels; it multiplies one of them by all rows, 32 at a time, while the next one is on its way
// from memory. Sums are floats; what becomes of them (a bias, a gate) is done between the steps of
// the next block, since vector and matrix unit work at the same time.

#include "amx.h"
#include "arguments.h"
#include "numbers.h"

#if defined(HAS_AMX) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace {

constexpr int64_t SIDE = 16, DEEP = 32, WIDE = 32;  // rows and depth of a tile, columns of a panel
constexpr int64_t TILE = 1024, STEP = 2 * TILE, LINE = 64, PAGE = 4096;  // bytes
constexpr int64_t MOST = 256;  // rows at a time: they stay in the second cache
constexpr int64_t CHUNK = 16;  // steps at a time: that much of a panel stays in the first one

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline __mmask32 lowest(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Memory of a thread that is kept for its next product.
class Kept {
  public:
    Kept() = default;
    Kept(const Kept &) = delete;
    Kept &operator=(const Kept &) = delete;
    ~Kept() { std::free(place_); }
    char *of(int64_t size) {
        if (size > size_) {
            std::free(place_);
            size_ = parts(size, PAGE) * PAGE;
            place_ = static_cast<char *>(std::aligned_alloc(PAGE, size_));
        }
        return place_;
    }

  private:
    char *place_ = nullptr;
    int64_t size_ = 0;
};
thread_local Kept kept;

// All eight tiles are of one shape. It is set anew for every product, and given up: other libraries
// have shapes of their own.
class Configured {
  public:
    Configured() {
        TileShapes shapes;
        for (int tile = 0; tile < 8; ++tile) shapes.set(tile, SIDE, LINE);
        shapes.use();
    }
    Configured(const Configured &) = delete;
    Configured &operator=(const Configured &) = delete;
    ~Configured() { _tile_release(); }
};

// ---- what becomes of sums ----------------------------------------------------------------------

inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// Sums of 32 columns plus a bias.
struct Plain {
    static constexpr int64_t COLUMNS = 32;
    struct Settings {
        const bf16 *bias;
    };
    __mmask32 mask;
    __m512 low, high;

    Plain(const Settings &the, int64_t column, int64_t n) : mask(lowest(n - column)) {
        const __m512i bias =
            the.bias ? _mm512_maskz_loadu_epi16(mask, the.bias + column) : _mm512_setzero_si512();
        low = widened(_mm512_castsi512_si256(bias));
        high = widened(_mm512_extracti64x4_epi64(bias, 1));
    }
    void row(const float *sums, bf16 *y) const {
        const __m512 a = _mm512_add_ps(_mm512_load_ps(sums), low);
        const __m512 b = _mm512_add_ps(_mm512_load_ps(sums + SIDE), high);
        _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
};

// As in numbers.h, for sixteen.
inline __m512 exponential(__m512 x) {
    // The second argument is what comes of anything that is not a number.
    const __m512 low = _mm512_max_ps(_mm512_set1_ps(-80.0f), x);
    const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(80.0f), low);
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693145752f), bounded);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(p, k);
}

// Sums of sixteen columns of a gate and of the same ones of what it is for.
struct Gated {
    static constexpr int64_t COLUMNS = 16;
    struct Settings {
        float m, c;
    };
    __mmask16 mask;
    __m512 m, c;

    Gated(const Settings &the, int64_t column, int64_t n)
        : mask(static_cast<__mmask16>(lowest(n - column))), m(_mm512_set1_ps(-the.m)),
          c(_mm512_set1_ps(-the.c)) {}
    void row(const float *sums, bf16 *y) const {
        const __m512 gate = widened(narrowed(_mm512_load_ps(sums)));
        const __m512 up = widened(narrowed(_mm512_load_ps(sums + SIDE)));
        const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(gate, gate), c, m);
        const __m512 one = _mm512_set1_ps(1.0f);
        const __m512 below = _mm512_add_ps(one, exponential(_mm512_mul_ps(slope, gate)));
        const __m512 share = widened(narrowed(_mm512_div_ps(gate, below)));
        _mm256_mask_storeu_epi16(y, mask, narrowed(_mm512_mul_ps(share, up)));
    }
};

// Rows of a block whose sums are ready.
template <class Finish> struct Waiting {
    Finish finish;
    const float *sums;
    bf16 *y;
    int64_t stride, rows;

    void some(int64_t count) {
        for (; count > 0 && rows > 0; --count, --rows, sums += WIDE, y += stride)
            finish.row(sums, y);
    }
};

// ---- products ----------------------------------------------------------------------------------

// Where tiles of rows lie: bytes from one row, step and tile below to the next.
struct Place {
    const char *at;
    int64_t row, step, tile;
};

// Rows [count, k] as tiles. Those that would end outside, below or to the right, are copied.
class Rows {
  public:
    Rows(const bf16 *x, int64_t count, int64_t k)
        : x_(x), count_(count), k_(k), steps_(parts(k, DEEP)),
          whole_(k % DEEP == 0 ? count / (2 * SIDE) * 2 * SIDE : 0),
          copy_(kept.of((count - whole_ + 2 * SIDE) * steps_ * LINE)) {
        for (int64_t top = whole_; top < count; top += SIDE) {
            const int64_t pair = (top - whole_) / (2 * SIDE);
            char *tile = copy_ + pair * steps_ * STEP + top / SIDE % 2 * TILE;
            for (int64_t done = 0; done < k; done += DEEP, tile += STEP) copy_tile(top, done, tile);
        }
        written(copy_);
    }

    Place block(int64_t top, int64_t step) const {
        const int64_t row = k_ * static_cast<int64_t>(sizeof(bf16));
        if (top < whole_)
            return {reinterpret_cast<const char *>(x_ + top * k_ + step * DEEP), row, LINE,
                    SIDE * row};
        return {copy_ + ((top - whole_) / (2 * SIDE) * steps_ + step) * STEP, LINE, STEP, TILE};
    }

  private:
    void copy_tile(int64_t top, int64_t done, char *tile) const {
        for (int64_t row = 0; row < SIDE; ++row) {
            const __mmask32 mask = top + row < count_ ? lowest(k_ - done) : 0;
            const bf16 *line = x_ + (top + row) * k_ + done;
            _mm512_store_si512(tile + row * LINE, _mm512_maskz_loadu_epi16(mask, line));
        }
    }

    const bf16 *x_;
    int64_t count_, k_, steps_, whole_;
    char *copy_;
};

// The next panel, brought nearer a few lines at a time. Its pages take turns: where a page is read
// from begin to end, the processor fetches ahead by itself, and so it does in all of them.
class Ahead {
  public:
    Ahead(const char *panel, int64_t size, int64_t lines)
        : at_(panel), size_(parts(size, PAGE) * PAGE), end_(panel + size_), lines_(lines) {}
    void some() {
        for (int64_t i = 0; i < lines_; ++i) {
            _mm_prefetch(at_, _MM_HINT_T1);
            at_ += PAGE;
            if (at_ >= end_) at_ -= size_ - LINE;
        }
    }

  private:
    const char *at_;
    int64_t size_;
    const char *end_;
    int64_t lines_;
};

// One or two tiles of rows times a chunk of a panel; `more`: in addition to what the sums are.
template <bool TWO, class Finish>
void block(Place x, const char *panel, int64_t steps, bool more, float *sums, Ahead &ahead,
           Waiting<Finish> &waiting, int64_t pace) {
    constexpr int64_t WIDTH = WIDE * sizeof(float), HALF = SIDE * WIDE;
    if (more) {
        _tile_loadd(0, sums, WIDTH);
        _tile_loadd(1, sums + SIDE, WIDTH);
        if (TWO) _tile_loadd(2, sums + HALF, WIDTH);
        if (TWO) _tile_loadd(3, sums + HALF + SIDE, WIDTH);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) _tile_zero(2);
        if (TWO) _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step, x.at += x.step, panel += STEP) {
        _tile_loadd(6, panel, LINE);
        _tile_loadd(7, panel + TILE, LINE);
        _tile_stream_loadd(4, x.at, x.row);  // past the first cache, which the panel fills
        if (TWO) _tile_stream_loadd(5, x.at + x.tile, x.row);
        _tile_dpbf16ps(0, 4, 6);
        waiting.some(pace);
        _tile_dpbf16ps(1, 4, 7);
        ahead.some();
        if (TWO) _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, WIDTH);
    _tile_stored(1, sums + SIDE, WIDTH);
    if (TWO) _tile_stored(2, sums + HALF, WIDTH);
    if (TWO) _tile_stored(3, sums + HALF + SIDE, WIDTH);
}

// Panels `first` to `last` of the product of x [rows, k] and a weight -> y [rows, n].
template <class Finish>
void panels_of(const bf16 *x, int64_t rows, int64_t k, const char *weight,
               const typename Finish::Settings &settings, bf16 *y, int64_t n, int64_t first,
               int64_t last) {
    const Rows tiles(x, rows, k);
    const int64_t steps = parts(k, DEEP), chunk = parts(steps, parts(steps, CHUNK));
    const int64_t pace = parts(2 * SIDE, chunk), lines = parts(STEP / LINE, parts(rows, 2 * SIDE));
    alignas(64) float sums[MOST * WIDE];
    Waiting<Finish> waiting = {Finish(settings, 0, n), sums, y, n, 0};
    for (int64_t at = first; at < last; ++at) {
        const char *panel = weight + at * steps * STEP;
        const Finish finish(settings, at * Finish::COLUMNS, n);
        Ahead ahead(panel + steps * STEP, steps * STEP, at + 1 < last ? lines : 0);
        for (int64_t from = 0; from < steps; from += chunk) {
            const int64_t some = std::min(chunk, steps - from);
            for (int64_t top = 0; top < rows; top += 2 * SIDE) {
                const int64_t tall = std::min(rows - top, 2 * SIDE);
                const auto kernel = tall > SIDE ? block<true, Finish> : block<false, Finish>;
                kernel(tiles.block(top, from), panel + from * STEP, some, from > 0,
                       sums + top * WIDE, ahead, waiting, pace);
                if (from + some < steps) continue;
                waiting.some(2 * SIDE);
                bf16 *place = y + top * n + at * Finish::COLUMNS;
                waiting = {finish, sums + top * WIDE, place, n, tall};
                if (rows <= 2 * SIDE) waiting.some(2 * SIDE);  // the next sums take their place
            }
        }
    }
    waiting.some(2 * SIDE);
}

template <class Finish>
void product(const bf16 *x, const char *weight, const typename Finish::Settings &settings, bf16 *y,
             int64_t rows, int64_t n, int64_t k, int threads) {
    const int64_t panels = parts(n, Finish::COLUMNS);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) {
        const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
        const Configured configured;
        for (int64_t top = 0; top < rows && first < last; top += MOST)
            panels_of<Finish>(x + top * k, std::min(rows - top, MOST), k, weight, settings,
                              y + top * n, n, first, last);
    }
}

// One tile of a weight [n, k]: pairs along k of its sixteen rows `w` (columns of the product).
inline void pack_tile(const bf16 *w, int64_t rows, int64_t k, int64_t left, bf16 *out) {
    alignas(64) bf16 edge[SIDE * DEEP];
    int64_t stride = k;
    if (rows < SIDE || left < DEEP) {
        for (int64_t row = 0; row < SIDE; ++row) {
            const __mmask32 mask = row < rows ? lowest(left) : 0;
            _mm512_store_si512(edge + row * DEEP, _mm512_maskz_loadu_epi16(mask, w + row * k));
        }
        w = edge;
        stride = DEEP;
    }
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride)));
    for (int64_t pair = 0; pair < DEEP / 2; ++pair)
        _mm512_storeu_si512(out + pair * 2 * SIDE, _mm512_i32gather_epi32(places, w + pair * 2, 2));
}

// `other` null: a panel has 32 rows of w; otherwise sixteen of each.
void pack_weight(const bf16 *w, const bf16 *other, bf16 *out, int64_t n, int64_t k, int threads) {
    const int64_t high = other ? SIDE : WIDE, panels = parts(n, high), steps = parts(k, DEEP);
    const bf16 *halves[2] = {w, other ? other : w + SIDE * k};
    const int64_t rows[2] = {n, other ? n : n - SIDE};
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t step = 0; step < steps; ++step)
            for (int half = 0; half < 2; ++half) {
                const int64_t row = panel * high, column = step * DEEP;
                bf16 *tile = out + ((panel * steps + step) * 2 + half) * SIDE * DEEP;
                pack_tile(halves[half] + row * k + column, rows[half] - row, k, k - column, tile);
            }
}

}  // namespace

KERNEL(products_supported) { *Arguments(first).pointer<int64_t>() = tiles_are_granted(); }

// Asks for large pages, before the memory is touched: a weight is read from begin to end, and the
// processor fetches ahead within a page only.
KERNEL(large_pages) {
    Arguments a(first);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(a.pointer<char>());
    const uintptr_t end = begin + static_cast<uintptr_t>(a.whole());
    const uintptr_t from = (begin + PAGE - 1) / PAGE * PAGE, to = end / PAGE * PAGE;
    if (from < to) madvise(reinterpret_cast<void *>(from), to - from, MADV_HUGEPAGE);
}

// Weight [n, k], another one of the same size or null -> panels, of both in turns.
KERNEL(pack_weight_b) {
    Arguments a(first);
    const bf16 *w = a.pointer<bf16>(), *other = a.pointer<bf16>();
    bf16 *out = a.pointer<bf16>();
    const int64_t n = a.whole(), k = a.whole();
    pack_weight(w, other, out, n, k, a.count());
}

// x [rows, k], panels of a weight [n, k], a bias [n] or null -> y [rows, n].
KERNEL(product_b) {
    Arguments a(first);
    const bf16 *x = a.pointer<bf16>();
    const char *weight = a.pointer<char>();
    const Plain::Settings settings = {a.pointer<bf16>()};
    bf16 *y = a.pointer<bf16>();
    const int64_t rows = a.whole(), n = a.whole(), k = a.whole();
    product<Plain>(x, weight, settings, y, rows, n, k, a.count());
}

// x [rows, k], panels of a gate [n, k] and of up [n, k] in turns
// -> y [rows, n], g * sigmoid(m g + c g^3) * u of the products g and u; all rounded as if each had
// been a step of its own.
KERNEL(gated_product_b) {
    Arguments a(first);
    const bf16 *x = a.pointer<bf16>();
    const char *weight = a.pointer<char>();
    bf16 *y = a.pointer<bf16>();
    const int64_t rows = a.whole(), n = a.whole(), k = a.whole();
    const float m = a.real(), c = a.real();
    product<Gated>(x, weight, {m, c}, y, rows, n, k, a.count());
}

#else

// Nothing else is called where the answer is no.
KERNEL(products_supported) { *Arguments(first).pointer<int64_t>() = 0; }

#endif
