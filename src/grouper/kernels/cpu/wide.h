// Queries, keys and values in bf16 by the processor's 512-bit registers.

#pragma once

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

}  // namespace

#endif
