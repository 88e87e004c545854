// Queries, keys and values in bf16 by the processor's 512-bit registers, and by its matrix unit.

#pragma once

#include "amx.h"
#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_WIDE 1

#include <immintrin.h>

#include <vector>

namespace {

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

  protected:
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

#if defined(HAS_AMX)

// The same with the products of keys and queries in tiles: sixteen keys times all queries, of which
// there are sixteen at most; D is 128 at most.
template <int64_t D> class Tiled : public Wide<D> {
  public:
    static bool serves(int64_t group) { return group <= 16 && D <= 128 && tiles_are_granted(); }

    Tiled(int64_t group, int64_t dim) : Wide<D>(group, dim) {
        TileShapes shapes;
        const int across = static_cast<int>(4 * group);
        for (const int tile : {0, 1}) shapes.set(tile, 16, across);
        for (const int tile : {2, 3}) shapes.set(tile, 16, 64);
        for (const int tile : {4, 5, 6, 7}) shapes.set(tile, 16, across);
        shapes.use();
    }
    ~Tiled() { _tile_release(); }
    Tiled(const Tiled &) = delete;
    Tiled &operator=(const Tiled &) = delete;

    void begin(const bf16 *queries) {
        Wide<D>::begin(queries);
        const int64_t group = this->group_;
        // A tile on the right holds pairs: line r has numbers 2 r and 2 r + 1 of every query.
        for (int64_t g = 0; g < group; ++g)
            for (int64_t d = 0; d < D / 2; ++d)
                std::memcpy(turned_ + (d * group + g) * 2, queries + g * D + 2 * d, 4);
        written(turned_);
        const int64_t step = 32 * group;  // numbers of a tile
        _tile_loadd(4, turned_, 4 * group);
        if constexpr (D >= 64) _tile_loadd(5, turned_ + step, 4 * group);
        if constexpr (D >= 96) _tile_loadd(6, turned_ + 2 * step, 4 * group);
        if constexpr (D >= 128) _tile_loadd(7, turned_ + 3 * step, 4 * group);
    }

    void scores(const bf16 *keys, const bf16 *ahead, int64_t count, float *score, int64_t most) {
        int64_t k = 0;
        for (; k + 32 <= count; k += 32) {
            fetch<D>(ahead + k * D, 32);
            _tile_zero(0);
            _tile_zero(1);
            two_blocks(keys + k * D, keys + (k + 16) * D);
            _tile_stored(0, found_, 4 * this->group_);
            _tile_stored(1, found_ + 16 * this->group_, 4 * this->group_);
            spread(score + k, most, 32);
        }
        for (; k < count; k += 16) {
            const bf16 *block = keys + k * D;
            const int64_t left = count - k < 16 ? count - k : 16;
            if (left < 16) {
                std::memcpy(last_, block, sizeof(bf16) * left * D);
                block = last_;
            }
            written(block);
            _tile_zero(0);
            _tile_zero(1);
            two_blocks(block, block);  // the second one for nothing
            _tile_stored(0, found_, 4 * this->group_);
            spread(score + k, most, left);
        }
    }

  private:
    static void two_blocks(const bf16 *one, const bf16 *other) {
        constexpr int64_t line = 2 * D;
        _tile_loadd(2, one, line);
        _tile_dpbf16ps(0, 2, 4);
        _tile_loadd(3, other, line);
        _tile_dpbf16ps(1, 3, 4);
        if constexpr (D >= 64) {
            _tile_loadd(2, one + 32, line);
            _tile_dpbf16ps(0, 2, 5);
            _tile_loadd(3, other + 32, line);
            _tile_dpbf16ps(1, 3, 5);
        }
        if constexpr (D >= 96) {
            _tile_loadd(2, one + 64, line);
            _tile_dpbf16ps(0, 2, 6);
            _tile_loadd(3, other + 64, line);
            _tile_dpbf16ps(1, 3, 6);
        }
        if constexpr (D >= 128) {
            _tile_loadd(2, one + 96, line);
            _tile_dpbf16ps(0, 2, 7);
            _tile_loadd(3, other + 96, line);
            _tile_dpbf16ps(1, 3, 7);
        }
    }

    // From [keys, queries] to a line of scores for each query.
    void spread(float *score, int64_t most, int64_t count) const {
        for (int64_t g = 0; g < this->group_; ++g)
            for (int64_t i = 0; i < count; ++i)
                score[g * most + i] = found_[i * this->group_ + g];
    }

    alignas(64) bf16 turned_[16 * 128];
    alignas(64) bf16 last_[16 * D] = {};
    alignas(64) float found_[32 * 16];
};

#endif

}  // namespace

#endif
