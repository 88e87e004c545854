// Attention of one new token a row over its prompt and what it has written itself.
//
// As in layers.cpp, ops.py checks what it hands over.

#include <vector>

#include "arguments.h"
#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_WIDE
#include <immintrin.h>
#endif

namespace {

// One key head's queries over its keys and values. D is the size of a head where it is a usual one,
// so that loops are unrolled and sums stay in registers, and 0 elsewhere.
template <class T, int64_t D> class Plain {
  public:
    Plain(int64_t group, int64_t dim)
        : group_(group), dim_(D > 0 ? D : dim), out_(static_cast<size_t>(group * dim)) {}

    void begin(const T *queries) {
        queries_ = queries;
        std::memset(out_.data(), 0, sizeof(float) * out_.size());
    }

    // Products of a run of keys with each query, whose scores lie `most` apart. What lies `ahead`,
    // as many lines, is read next.
    void scores(const T *keys, const T *ahead, int64_t count, float *score, int64_t most) const {
        (void)ahead;
        const int64_t size = D > 0 ? D : dim_;
        for (int64_t g = 0; g < group_; ++g) {
            const T *query = queries_ + g * size;
            for (int64_t k = 0; k < count; ++k) {
                const T *key = keys + k * size;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < size; ++d) sum += load(query[d]) * load(key[d]);
                score[g * most + k] = sum;
            }
        }
    }

    // Adds a run of values to each query's output, weighted by its shares, which lie `most` apart.
    void add(const float *share, int64_t most, const T *values, const T *ahead, int64_t count) {
        (void)ahead;
        int64_t g = 0;
        for (; g + 2 <= group_; g += 2) add_some<2>(share + g * most, most, values, count, g);
        if (g < group_) add_some<1>(share + g * most, most, values, count, g);
    }

    void finish(T *y) const {
        for (int64_t i = 0; i < group_ * dim_; ++i) store(y[i], out_[i]);
    }

  private:
    // Two queries at a time take half the loads.
    template <int Q>
    void add_some(const float *share, int64_t most, const T *values, int64_t count, int64_t g) {
        const int64_t size = D > 0 ? D : dim_;
        float held[Q * (D > 0 ? D : 1)];
        float *out = out_.data() + g * size;
        float *sum = D > 0 ? held : out;
        if (D > 0) std::memcpy(held, out, sizeof held);
        for (int64_t k = 0; k < count; ++k) {
            const T *value = values + k * size;
#pragma omp simd
            for (int64_t d = 0; d < size; ++d) {
                const float one = load(value[d]);
                for (int q = 0; q < Q; ++q) sum[q * size + d] += share[q * most + k] * one;
            }
        }
        if (D > 0) std::memcpy(out, held, sizeof held);
    }

    int64_t group_, dim_;
    const T *queries_ = nullptr;
    std::vector<float> out_;
};

#if defined(HAS_WIDE)

// ---- bf16 by the processor's 512-bit registers --------------------------------------------------

// Lane i of the result: the sum of all lanes of v[i].
inline __m512 sums(const __m512 v[16]) {
    __m512 pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                                 _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                                     _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88),
                                      _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                         _mm512_shuffle_f32x4(low, high, 0xdd));
}

// Bits of bf16 in the lower half of each lane, rounded as `store` does.
inline __m512i rounded_bits(__m512 value) {
    const __m512i wide = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
    return _mm512_mask_blend_epi32(number, _mm512_set1_epi32(0x7fc0), _mm512_srli_epi32(up, 16));
}

// Memory for the processor to bring nearer while it works on something else: what a worker reads
// next lies elsewhere, and would not be seen coming.
template <int64_t D> inline void fetch(const bf16 *lines, int64_t count) {
    for (int64_t i = 0; i < count * D; i += 32)
        _mm_prefetch(reinterpret_cast<const char *>(lines + i), _MM_HINT_T1);
}

// One key head's queries over its keys and values, D a multiple of 32.
template <int64_t D> class Wide {
  public:
    Wide(int64_t group, int64_t) : group_(group), out_(static_cast<size_t>(group * D)) {}

    void begin(const bf16 *queries) {
        queries_ = queries;
        std::memset(out_.data(), 0, sizeof(float) * out_.size());
    }

    // Products of sixteen keys at a time with each query, by the processor's own instruction.
    void scores(const bf16 *keys, const bf16 *ahead, int64_t count, float *score, int64_t most) {
        fetch<D>(ahead, count);
        for (int64_t g = 0; g < group_; ++g) {
            const bf16 *query = queries_ + g * D;
            int64_t k = 0;
            for (; k + 16 <= count; k += 16) {
                __m512 held[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) held[i] = product(query, keys + (k + i) * D);
                _mm512_storeu_ps(score + g * most + k, sums(held));
            }
            for (; k < count; ++k)
                score[g * most + k] = _mm512_reduce_add_ps(product(query, keys + k * D));
        }
    }

    void add(const float *share, int64_t most, const bf16 *values, const bf16 *ahead,
             int64_t count) {
        int64_t g = 0;
        for (; g + 2 <= group_; g += 2)
            add_some<2>(share + g * most, most, values, g > 0 ? values : ahead, count, g);
        if (g < group_)
            add_some<1>(share + g * most, most, values, g > 0 ? values : ahead, count, g);
    }

    void finish(bf16 *y) const {
        for (int64_t i = 0; i < group_ * D; i += 32) {
            const __m512i even = rounded_bits(_mm512_loadu_ps(out_.data() + i));
            const __m512i odd = rounded_bits(_mm512_loadu_ps(out_.data() + i + 16));
            _mm512_storeu_si512(y + i, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }

  private:
    static __m512 product(const bf16 *query, const bf16 *key) {
        __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int64_t d = 0; d < D; d += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(key + d),
                                   (__m512bh)_mm512_loadu_si512(query + d));
        return sum;
    }

    // Two queries at a time take half the loads. Sums of numbers at even places and of those at
    // odd ones lie apart, sixteen each, until `finish` puts them together.
    template <int Q>
    void add_some(const float *share, int64_t most, const bf16 *values, const bf16 *ahead,
                  int64_t count, int64_t g) {
        constexpr int parts = D / 16;
        __m512 held[Q][parts];
        float *out = out_.data() + g * D;
#pragma GCC unroll 2
        for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
            for (int p = 0; p < parts; ++p) held[q][p] = _mm512_loadu_ps(out + q * D + p * 16);
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        for (int64_t k = 0; k < count; ++k) {
            fetch<D>(ahead + k * D, 1);
            __m512 one[Q];
#pragma GCC unroll 2
            for (int q = 0; q < Q; ++q) one[q] = _mm512_set1_ps(share[q * most + k]);
#pragma GCC unroll 8
            for (int p = 0; p < parts; p += 2) {
                const __m512i both = _mm512_loadu_si512(values + k * D + p * 16);
                const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
#pragma GCC unroll 2
                for (int q = 0; q < Q; ++q) {
                    held[q][p] = _mm512_fmadd_ps(one[q], even, held[q][p]);
                    held[q][p + 1] = _mm512_fmadd_ps(one[q], odd, held[q][p + 1]);
                }
            }
        }
#pragma GCC unroll 2
        for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
            for (int p = 0; p < parts; ++p) _mm512_storeu_ps(out + q * D + p * 16, held[q][p]);
    }

    int64_t group_;
    const bf16 *queries_ = nullptr;
    std::vector<float> out_;
};

#endif

// Scores [count] become shares of a softmax.
inline void softmax(float *score, int64_t count, float scaling, float softcap) {
    if (softcap > 0)
        for (int64_t i = 0; i < count; ++i)
            score[i] = std::tanh(score[i] * scaling / softcap) * softcap;
    const float factor = softcap > 0 ? 1.0f : scaling;
    float top = score[0] * factor;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i)
        top = score[i] * factor > top ? score[i] * factor : top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        score[i] = exponential(score[i] * factor - top);
        sum += score[i];
    }
    const float whole = 1.0f / sum;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) score[i] *= whole;
}

// Consecutive keys and values that a row sees.
template <class T> struct Run {
    const T *keys, *values;
    int64_t count;
};

template <class T> struct Decode {
    const T *query, *key, *value;
    T *keys, *values;
    const T *prompt_keys, *prompt_values;
    T *y;
    const int64_t *lengths, *owners, *prompt_lengths;
    int64_t column, rows, heads, group, dim, width, prompt_width, window;
    float scaling, softcap;

    // What row `place / heads` sees: its prompt, then its own columns, going backwards round the
    // ring from this step's; at most `window` tokens.
    int64_t runs_of(int64_t place, Run<T> runs[3]) const {
        const int64_t row = place / heads, owner = owners[row];
        const int64_t seen = lengths[row], prompt = prompt_lengths[owner];
        const int64_t own = window > 0 && window < seen ? window : seen;
        const int64_t left = window > 0 ? window - own : prompt;
        const int64_t old = left < prompt ? left : prompt;
        const int64_t tail = own <= column + 1 ? own : column + 1;
        const int64_t first = ((owner * heads + place % heads) * prompt_width + prompt - old) * dim;
        const int64_t late = (place * width + column + 1 - tail) * dim;
        const int64_t early = (place * width + width - (own - tail)) * dim;
        int64_t parts = 0;
        if (old > 0) runs[parts++] = {prompt_keys + first, prompt_values + first, old};
        if (own > tail) runs[parts++] = {keys + early, values + early, own - tail};
        runs[parts++] = {keys + late, values + late, tail};
        return parts;
    }
};

// Queries [rows, heads, group, dim]; own keys and values [>= rows, heads, width, dim], of which
// this step's column is written first, from `key` and `value` [rows, heads, dim]; those of prompts
// [prompts, heads, prompt_width, dim], of which row r continues prompt owners[r].
template <class Worker, class T> void decode(const Decode<T> &args, int threads) {
    const int64_t dim = args.dim, places = args.rows * args.heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t most = args.prompt_width + args.width;
        std::vector<float> scores(static_cast<size_t>(args.group * most));
        Worker worker(args.group, dim);
        // In turns, since rows that began together are equally long: every thread gets as much.
#pragma omp for schedule(static, 1)
        for (int64_t place = 0; place < places; ++place) {
            const int64_t now = (place * args.width + args.column) * dim;
            std::memcpy(args.keys + now, args.key + place * dim, sizeof(T) * dim);
            std::memcpy(args.values + now, args.value + place * dim, sizeof(T) * dim);
            Run<T> runs[3];
            const int64_t parts = args.runs_of(place, runs);
            Run<T> next[3];
            const bool more = place + threads < places;
            const int64_t coming = more ? args.runs_of(place + threads, next) : 0;
            worker.begin(args.query + place * args.group * dim);
            int64_t found = 0;
            for (int64_t part = 0; part < parts; found += runs[part++].count) {
                const Run<T> &run = runs[part];
                worker.scores(run.keys, run.values, run.count, scores.data() + found, most);
            }
            for (int64_t g = 0; g < args.group; ++g)
                softmax(scores.data() + g * most, found, args.scaling, args.softcap);
            found = 0;
            for (int64_t part = 0; part < parts; found += runs[part++].count) {
                const Run<T> &run = runs[part];
                const T *ahead = part < coming ? next[part].keys : run.values;
                worker.add(scores.data() + found, most, run.values, ahead, run.count);
            }
            worker.finish(args.y + place * args.group * dim);
        }
    }
}

// The best worker for heads of this size and type.
template <int64_t D> void decode_of(const Decode<float> &args, int threads) {
    decode<Plain<float, D>>(args, threads);
}

template <int64_t D> void decode_of(const Decode<bf16> &args, int threads) {
#if defined(HAS_WIDE)
    if constexpr (D > 0) return decode<Wide<D>>(args, threads);
#endif
    decode<Plain<bf16, D>>(args, threads);
}

template <class T>
void decode_any(const T *query, const T *key, const T *value, T *keys, T *values,
                const T *prompt_keys, const T *prompt_values, T *y, const int64_t *lengths,
                const int64_t *owners, const int64_t *prompt_lengths, const int64_t *column,
                int64_t rows, int64_t heads, int64_t group, int64_t dim, int64_t width,
                int64_t prompt_width, int64_t window, float scaling, float softcap, int threads) {
    const Decode<T> args{query,         key,     value,  keys,           values,  prompt_keys,
                         prompt_values, y,       lengths, owners,        prompt_lengths,
                         *column,       rows,    heads,  group,          dim,     width,
                         prompt_width,  window,  scaling, softcap};
    if (dim == 32) return decode_of<32>(args, threads);
    if (dim == 64) return decode_of<64>(args, threads);
    if (dim == 128) return decode_of<128>(args, threads);
    decode_of<0>(args, threads);
}

}  // namespace

// f is float, b is bf16.
KERNEL(decode_f, decode_any<float>)
KERNEL(decode_b, decode_any<bf16>)
