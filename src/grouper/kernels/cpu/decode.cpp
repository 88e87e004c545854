// Attention of one new token per row over its prompt and its own earlier tokens.
//
// As for layers.cpp, ops.py checks the arguments.

#include <vector>

#include "arguments.h"
#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace {

// D is the size of a head where it is a usual one, so that loops are unrolled and sums stay in
// registers, and 0 elsewhere.
template <int64_t D, class T> inline float product(const T *query, const T *key, int64_t dim) {
    const int64_t size = D > 0 ? D : dim;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if constexpr (D > 0 && sizeof(T) == sizeof(bf16)) {
        __m512 lanes = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int64_t d = 0; d < D; d += 32)
            lanes = _mm512_dpbf16_ps(lanes, (__m512bh)_mm512_loadu_si512(key + d),
                                     (__m512bh)_mm512_loadu_si512(query + d));
        return _mm512_reduce_add_ps(lanes);
    }
#endif
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < size; ++d) sum += load(query[d]) * load(key[d]);
    return sum;
}

// Cache lines to prefetch during other work: what a worker reads next lies elsewhere, where the
// processor's own prefetching does not look.
template <class T> inline void fetch(const T *lines, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(lines + i, 0, 2);
}

// Products of a run of keys with each query, whose scores lie `most` apart. What lies `ahead`, as
// many lines, is read next.
template <int64_t D, class T>
void multiply(const T *queries, int64_t group, int64_t size, const T *keys, const T *ahead,
              int64_t count, float *score, int64_t most) {
    fetch(ahead, count * size);
    for (int64_t g = 0; g < group; ++g)
        for (int64_t k = 0; k < count; ++k)
            score[g * most + k] = product<D>(queries + g * size, keys + k * size, size);
}

// Adds a run of values to Q outputs, weighted by their shares, which lie `most` apart.
template <int64_t D, int Q, class T>
void mix(const float *share, int64_t most, const T *values, const T *ahead, int64_t count,
         int64_t dim, float *out) {
    const int64_t size = D > 0 ? D : dim;
    float held[Q * (D > 0 ? D : 1)];
    float *sum = D > 0 ? held : out;
    if (D > 0) std::memcpy(held, out, sizeof held);
    for (int64_t k = 0; k < count; ++k) {
        const T *value = values + k * size;
        fetch(ahead + k * size, size);
#pragma omp simd
        for (int64_t d = 0; d < size; ++d) {
            const float one = load(value[d]);
            for (int q = 0; q < Q; ++q) sum[q * size + d] += share[q * most + k] * one;
        }
    }
    if (D > 0) std::memcpy(out, held, sizeof held);
}

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

// Queries [rows, heads, group, dim]; own keys and values [>= rows, heads, width, dim], of which
// this step's column is written first, from `key` and `value` [rows, heads, dim]; those of prompts
// [prompts, heads, prompt_width, dim], of which row r continues prompt owners[r].
template <class T> struct Decode {
    const T *query, *key, *value;
    T *keys, *values;
    const T *prompt_keys, *prompt_values;
    T *y;
    const int64_t *lengths, *owners, *prompt_lengths, *column_at;
    int64_t rows, heads, group, dim, width, prompt_width, window;
    double scaling, softcap;
    int64_t threads;

    void run() const {
        if (dim == 32) return over_heads<32>(*column_at);
        if (dim == 64) return over_heads<64>(*column_at);
        if (dim == 128) return over_heads<128>(*column_at);
        over_heads<0>(*column_at);
    }

    // What row `place / heads` sees: its prompt, then its own columns, going backwards round the
    // ring from this step's; at most `window` tokens.
    int64_t runs_of(int64_t place, int64_t column, Run<T> runs[3]) const {
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

    template <int64_t D> void over_heads(int64_t column) const {
        const int64_t places = rows * heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const int64_t most = prompt_width + width;
            std::vector<float> scores(static_cast<size_t>(group * most));
            std::vector<float> out(static_cast<size_t>(group * dim));
            // Dealt in turns: rows that began together are equally long, so threads share evenly.
#pragma omp for schedule(static, 1)
            for (int64_t place = 0; place < places; ++place) {
                const int64_t now = (place * width + column) * dim;
                std::memcpy(keys + now, key + place * dim, sizeof(T) * dim);
                std::memcpy(values + now, value + place * dim, sizeof(T) * dim);
                Run<T> runs[3];
                const int64_t parts = runs_of(place, column, runs);
                Run<T> next[3];
                const bool more = place + threads < places;
                const int64_t coming = more ? runs_of(place + threads, column, next) : 0;
                int64_t found = 0;
                for (int64_t part = 0; part < parts; found += runs[part++].count) {
                    const Run<T> &run = runs[part];
                    multiply<D>(query + place * group * dim, group, dim, run.keys, run.values,
                                run.count, scores.data() + found, most);
                }
                for (int64_t g = 0; g < group; ++g)
                    softmax(scores.data() + g * most, found, static_cast<float>(scaling),
                            static_cast<float>(softcap));
                found = 0;
                out.assign(out.size(), 0.0f);
                for (int64_t part = 0; part < parts; found += runs[part++].count) {
                    const Run<T> &run = runs[part];
                    const T *ahead = part < coming ? next[part].keys : run.values;
                    // Two queries at a time take half the loads.
                    for (int64_t g = 0; g < group; g += 2) {
                        const float *share = scores.data() + g * most + found;
                        const auto add = g + 1 < group ? mix<D, 2, T> : mix<D, 1, T>;
                        add(share, most, run.values, g > 0 ? run.values : ahead, run.count, dim,
                            out.data() + g * dim);
                    }
                }
                for (int64_t i = 0; i < group * dim; ++i) store(y[place * group * dim + i], out[i]);
            }
        }
    }
};

}  // namespace

// f is float, b is bf16.
KERNEL(decode_f, Decode<float>)
KERNEL(decode_b, Decode<bf16>)
