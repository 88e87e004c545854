// Attention: the middle of its backward, and one new token a row over a cache.
//
// As in layers.cpp, ops.py checks what it hands over.

#include <cstdlib>

#include "arguments.h"
#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// ---- backward of attention, between its products of matrices -------------------------------------

// What the rows of a slice may look at: their prompt's columns, and the causal part of their own.
struct Sight {
    int64_t per_row, group, tokens, columns, prompt_columns, window;
    const int64_t *prompts, *lengths;
};

// Scores and gradients of the shares [count, group, tokens, columns], log-sum-exps and deltas (the
// gradient times the output, summed) [count, group, tokens] -> shares and gradients of the scores,
// zero where nothing is seen. Block i belongs to row (first + i) / per_row.
template <class T>
void attention_backward(const float *scores, const float *share_grads, const float *weights,
                        const float *deltas, T *shares, T *score_grads, int64_t first,
                        int64_t count, float scaling, const Sight &the, int threads) {
    const int64_t lines = the.group * the.tokens;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 16)
    for (int64_t line = 0; line < count * lines; ++line) {
        const int64_t row = (first + line / lines) / the.per_row, token = line % the.tokens;
        T *share = shares + line * the.columns, *out = score_grads + line * the.columns;
        std::memset(share, 0, sizeof(T) * the.columns);
        std::memset(out, 0, sizeof(T) * the.columns);
        if (token >= the.lengths[row]) continue;
        const float *score = scores + line * the.columns;
        const float *grad = share_grads + line * the.columns;
        const float weight = weights[line], delta = deltas[line];
        const int64_t prompt = the.prompts[row];
        const int64_t window = the.window > 0 ? the.window : prompt + token + 1;
        const int64_t old = prompt + token + 1 - window;
        const int64_t starts[2] = {old > 0 ? old : 0,
                                   the.prompt_columns + (old > prompt ? old - prompt : 0)};
        const int64_t ends[2] = {prompt, the.prompt_columns + token + 1};
        for (int part = 0; part < 2; ++part) {
#pragma omp simd
            for (int64_t i = starts[part]; i < ends[part]; ++i) {
                const float p = exponential(score[i] * scaling - weight);
                store(share[i], p);
                store(out[i], p * (grad[i] - delta) * scaling);
            }
        }
    }
}

// ---- attention of one new token a row over its prompt and what it has written itself -----------

#if defined(__AVX512BF16__)

// Lane i of the result: the sum of all lanes of v[i].
inline __m512 sums(const __m512 v[16]) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                                 _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
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

// Products of sixteen keys with a query by the processor's own bf16 instruction; returns how many
// keys are done.
template <int64_t D>
inline int64_t sixteen_at_a_time(const bf16 *query, const bf16 *keys, int64_t count,
                                 float *score) {
    if (D == 0 || D % 32 != 0) return 0;
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        __m512 held[16];
        for (int i = 0; i < 16; ++i) {
            held[i] = _mm512_setzero_ps();
            for (int64_t d = 0; d < D; d += 32)
                held[i] = _mm512_dpbf16_ps(
                    held[i], (__m512bh)_mm512_loadu_si512(keys + (k + i) * D + d),
                    (__m512bh)_mm512_loadu_si512(query + d));
        }
        _mm512_storeu_ps(score + k, sums(held));
    }
    return k;
}

#else

template <int64_t D>
inline int64_t sixteen_at_a_time(const bf16 *, const bf16 *, int64_t, float *) { return 0; }

#endif

template <int64_t D>
inline int64_t sixteen_at_a_time(const float *, const float *, int64_t, float *) { return 0; }

// Dot products of a query with a run of keys. D is the size of a head where it is a usual one, so
// that loops are unrolled and sums stay in registers, and 0 elsewhere.
template <class T, int64_t D>
inline void scores_of(const T *query, const T *keys, int64_t count, int64_t dim, float *score) {
    const int64_t size = D > 0 ? D : dim;
    for (int64_t k = sixteen_at_a_time<D>(query, keys, count, score); k < count; ++k) {
        const T *key = keys + k * size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < size; ++d) sum += load(query[d]) * load(key[d]);
        score[k] = sum;
    }
}

// Adds a run of values to the outputs [Q, dim] of Q queries, weighted by their shares, which lie
// `stride` apart. Two queries at a time take half the loads.
template <class T, int64_t D, int Q>
inline void add_values(const float *share, int64_t stride, const T *values, int64_t count,
                       int64_t dim, float *out) {
    const int64_t size = D > 0 ? D : dim;
    float held[Q * (D > 0 ? D : 1)];
    float *sum = D > 0 ? held : out;
    if (D > 0) std::memcpy(held, out, sizeof held);
    for (int64_t k = 0; k < count; ++k) {
        const T *value = values + k * size;
#pragma omp simd
        for (int64_t d = 0; d < size; ++d) {
            const float one = load(value[d]);
            for (int q = 0; q < Q; ++q) sum[q * size + d] += share[q * stride + k] * one;
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

// Ask for memory before it is needed: runs are too short, and too far apart, for the processor to
// see them coming (a third of the time at 64 to 128 columns).
template <class T> inline void prefetch(const T *block, int64_t elements) {
    const char *place = reinterpret_cast<const char *>(block);
    for (const char *end = place + elements * static_cast<int64_t>(sizeof(T)); place < end;
         place += 64)
        __builtin_prefetch(place);
}

template <class T> struct Decode {
    const T *query, *key, *value;
    T *keys, *values;
    const T *prompt_keys, *prompt_values;
    T *y;
    const int64_t *lengths, *owners, *prompt_lengths;
    int64_t rows, heads, group, dim, width, column, prompt_width, window;
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
template <class T, int64_t D> void decode(const Decode<T> &the, int threads) {
    const int64_t dim = the.dim, places = the.rows * the.heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t most = the.prompt_width + the.width;
        float *out =
            static_cast<float *>(std::malloc(sizeof(float) * the.group * (dim + most)));
        float *scores = out + the.group * dim;
        // In turns, since rows that began together are equally long: every thread gets as much.
#pragma omp for schedule(static, 1)
        for (int64_t place = 0; place < places; ++place) {
            const int64_t now = (place * the.width + the.column) * dim;
            std::memcpy(the.keys + now, the.key + place * dim, sizeof(T) * dim);
            std::memcpy(the.values + now, the.value + place * dim, sizeof(T) * dim);
            Run<T> runs[3], next[3];
            const int64_t parts = the.runs_of(place, runs);
            for (int64_t part = 0; part < parts; ++part)
                prefetch(runs[part].values, runs[part].count * dim);
            const int64_t coming =
                place + threads < places ? the.runs_of(place + threads, next) : 0;
            for (int64_t part = 0; part < coming; ++part)
                prefetch(next[part].keys, next[part].count * dim);
            for (int64_t g = 0; g < the.group; ++g) {
                const T *query = the.query + (place * the.group + g) * dim;
                float *score = scores + g * most;
                int64_t found = 0;
                for (int64_t part = 0; part < parts; found += runs[part++].count)
                    scores_of<T, D>(query, runs[part].keys, runs[part].count, dim, score + found);
                softmax(score, found, the.scaling, the.softcap);
            }
            std::memset(out, 0, sizeof(float) * the.group * dim);
            int64_t found = 0;
            for (int64_t part = 0; part < parts; found += runs[part++].count) {
                const Run<T> &run = runs[part];
                int64_t g = 0;
                for (; g + 2 <= the.group; g += 2)
                    add_values<T, D, 2>(scores + g * most + found, most, run.values, run.count,
                                        dim, out + g * dim);
                if (g < the.group)
                    add_values<T, D, 1>(scores + g * most + found, most, run.values, run.count,
                                        dim, out + g * dim);
            }
            T *y = the.y + place * the.group * dim;
            for (int64_t i = 0; i < the.group * dim; ++i) store(y[i], out[i]);
        }
        std::free(out);
    }
}

template <class T> void decode_of_size(const Decode<T> &the, int threads) {
    const auto kernel = the.dim == 32    ? decode<T, 32>
                        : the.dim == 64  ? decode<T, 64>
                        : the.dim == 128 ? decode<T, 128>
                                         : decode<T, 0>;
    kernel(the, threads);
}

}  // namespace

// f is float, b is bf16.
#define ATTENTION(NAME, T)                                                                        \
    KERNEL(attention_backward_##NAME) {                                                           \
        Arguments a(first);                                                                       \
        const float *scores = a.pointer<float>(), *share_grads = a.pointer<float>();              \
        const float *weights = a.pointer<float>(), *deltas = a.pointer<float>();                  \
        T *shares = a.pointer<T>(), *score_grads = a.pointer<T>();                                \
        const int64_t *prompts = a.pointer<int64_t>(), *lengths = a.pointer<int64_t>();           \
        const int64_t begin = a.whole(), count = a.whole();                                       \
        Sight the;                                                                                \
        the.per_row = a.whole(), the.group = a.whole(), the.tokens = a.whole();                   \
        the.columns = a.whole(), the.prompt_columns = a.whole(), the.window = a.whole();          \
        the.prompts = prompts, the.lengths = lengths;                                             \
        const float scaling = a.real();                                                           \
        attention_backward(scores, share_grads, weights, deltas, shares, score_grads, begin,      \
                           count, scaling, the, a.count());                                       \
    }                                                                                             \
    KERNEL(decode_##NAME) {                                                                       \
        Arguments a(first);                                                                       \
        Decode<T> the;                                                                            \
        the.query = a.pointer<T>(), the.key = a.pointer<T>(), the.value = a.pointer<T>();         \
        the.keys = a.pointer<T>(), the.values = a.pointer<T>();                                   \
        the.prompt_keys = a.pointer<T>(), the.prompt_values = a.pointer<T>();                     \
        the.y = a.pointer<T>();                                                                   \
        the.lengths = a.pointer<int64_t>(), the.owners = a.pointer<int64_t>();                    \
        the.prompt_lengths = a.pointer<int64_t>(), the.column = *a.pointer<int64_t>();            \
        the.rows = a.whole(), the.heads = a.whole(), the.group = a.whole();                       \
        the.dim = a.whole(), the.width = a.whole(), the.prompt_width = a.whole();                 \
        the.window = a.whole(), the.scaling = a.real(), the.softcap = a.real();                   \
        decode_of_size(the, a.count());                                                           \
    }

ATTENTION(f, float)
ATTENTION(b, bf16)
