// What a model does to its numbers between two matrix products, in one pass over memory each.
//
// Every function is called from kernels/ops.py, which checks types, shapes and layouts; nothing is
// checked here. T is float or bf16; sums are made in float. Rounding to bf16 happens where the
// model's own code rounds, so that both agree to the last bit or two.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(bf16 x) {
    const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline void store(float &place, float value) { place = value; }
inline void store(bf16 &place, float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const bool number = (wide & 0x7fffffffu) <= 0x7f800000u;
    place.bits = static_cast<uint16_t>(number ? rounded : 0x7fc0u);
}

// The value that storing it in a T leaves.
template <class T> inline float rounded(float value) {
    T place;
    store(place, value);
    return load(place);
}

// e^x to 2 units in the last place, written so that compilers turn a loop of it into vector code:
// e^x = 2^k e^r with |r| <= ln(2)/2, and Taylor's polynomial for e^r.
inline float exponential(float x) {
    const float low = x < -80.0f ? -80.0f : x;
    const float bounded = low > 80.0f ? 80.0f : low;
    const float k = std::floor(bounded * 1.44269504f + 0.5f);
    const float r = (bounded - k * 0.693145752f) - k * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t power = (static_cast<int32_t>(k) + 127) * (1 << 23);
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;  // not a number stays so: p comes from x
}

// ---- RMS normalisation -------------------------------------------------------------------------

// `ones`: the weight is 1 + w and multiplied before rounding (Gemma); otherwise w, after (Llama).
template <class X, class W, class Y>
void rms_norm(const X *x, const W *w, Y *y, float *inverse, int64_t rows, int64_t width, float eps,
              bool ones, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const X *in = x + row * width;
        Y *out = y + row * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) sum += load(in[i]) * load(in[i]);
        const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
        inverse[row] = scale;
        if (ones) {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                store(out[i], load(in[i]) * scale * (1.0f + load(w[i])));
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                store(out[i], rounded<X>(load(in[i]) * scale) * load(w[i]));
        }
    }
}

// `w_grad`: [threads, width], zeros; thread t adds up rows t * rows / threads onwards.
template <class X, class W, class Y>
void rms_norm_backward(const Y *grad, const X *x, const W *w, const float *inverse, X *x_grad,
                       float *w_grad, int64_t rows, int64_t width, bool ones, int threads) {
    const float one = ones ? 1.0f : 0.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
    for (int t = 0; t < threads; ++t) {
        float *own = w_grad + t * width;
        for (int64_t row = t * rows / threads; row < (t + 1) * rows / threads; ++row) {
            const X *in = x + row * width;
            const Y *g = grad + row * width;
            X *out = x_grad + row * width;
            const float scale = inverse[row];
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; ++i) {
                const float normed = load(in[i]) * scale;
                sum += load(g[i]) * (one + load(w[i])) * normed;
                own[i] += load(g[i]) * normed;
            }
            const float mean = sum / static_cast<float>(width);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const float normed = load(in[i]) * scale;
                store(out[i], scale * (load(g[i]) * (one + load(w[i])) - normed * mean));
            }
        }
    }
}

// ---- rotary embedding --------------------------------------------------------------------------

// x [tokens, heads, dim] with strides, cosine and sine [tokens, dim] -> y contiguous.
template <class X, class C, class Y>
void rotate(const X *x, const C *cosine, const C *sine, Y *y, int64_t tokens, int64_t heads,
            int64_t dim, int64_t token_stride, int64_t head_stride, bool backward, int threads) {
    const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; ++token) {
        const C *c = cosine + token * dim, *s = sine + token * dim;
        for (int64_t head = 0; head < heads; ++head) {
            const X *in = x + token * token_stride + head * head_stride;
            Y *out = y + (token * heads + head) * dim;
            if (backward) {
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = load(in[i]), b = load(in[i + half]);
                    store(out[i], a * load(c[i]) + b * load(s[i + half]));
                    store(out[i + half], b * load(c[i + half]) - a * load(s[i]));
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = load(in[i]), b = load(in[i + half]);
                    store(out[i], a * load(c[i]) - b * load(s[i]));
                    store(out[i + half], b * load(c[i + half]) + a * load(s[i + half]));
                }
            }
        }
    }
}

// ---- gated activation --------------------------------------------------------------------------

// x * sigmoid(m x + c x^3): SiLU with m = 1, c = 0; GELU's tanh form with m = sqrt(8 / pi) and
// c = 0.044715 m, since (1 + tanh(z)) / 2 = sigmoid(2 z).
// Cut by hand: compilers vectorise a plain inner loop, and not always a parallel one.
constexpr int64_t BLOCK = 4096;

// Gate and up: [rows, width] with this stride between rows; y is contiguous.
template <class T>
void gated(const T *gate, const T *up, T *y, int64_t rows, int64_t width, int64_t stride, float m,
           float c, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T *__restrict a = gate + row * stride, *__restrict b = up + row * stride;
        T *__restrict out = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float g = load(a[i]);
            const float share = 1.0f / (1.0f + exponential(-(m * g + c * g * g * g)));
            store(out[i], rounded<T>(g * share) * load(b[i]));
        }
    }
}

template <class T>
void gated_backward(const T *__restrict grad, const T *__restrict gate, const T *__restrict up,
                    T *__restrict gate_grad, T *__restrict up_grad, int64_t count, float m, float c, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = start + BLOCK < count ? start + BLOCK : count;
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            const float g = load(gate[i]), d = load(grad[i]);
            const float share = 1.0f / (1.0f + exponential(-(m * g + c * g * g * g)));
            const float slope = share + g * share * (1.0f - share) * (m + 3.0f * c * g * g);
            store(gate_grad[i], d * load(up[i]) * slope);
            store(up_grad[i], d * rounded<T>(g * share));
        }
    }
}

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

// One name for each combination of types: f is float, b is bf16, in the order of the template.
// Pointers come first, then numbers, then flags and the number of threads as int.
#define NORM(NAME, X, W, Y)                                                                       \
    extern "C" void rms_norm_##NAME(const X *x, const W *w, Y *y, float *inverse, int64_t rows,   \
                                    int64_t width, float eps, int ones, int threads) {            \
        rms_norm(x, w, y, inverse, rows, width, eps, ones != 0, threads);                         \
    }                                                                                             \
    extern "C" void rms_norm_backward_##NAME(const Y *grad, const X *x, const W *w,               \
                                             const float *inverse, X *x_grad, float *w_grad,      \
                                             int64_t rows, int64_t width, int ones,               \
                                             int threads) {                                       \
        rms_norm_backward(grad, x, w, inverse, x_grad, w_grad, rows, width, ones != 0, threads);  \
    }
#define ROTATE(NAME, X, C, Y)                                                                     \
    extern "C" void rotate_##NAME(const X *x, const C *cosine, const C *sine, Y *y,               \
                                  int64_t tokens, int64_t heads, int64_t dim,                     \
                                  int64_t token_stride, int64_t head_stride, int backward,        \
                                  int threads) {                                                  \
        rotate(x, cosine, sine, y, tokens, heads, dim, token_stride, head_stride, backward != 0,  \
               threads);                                                                          \
    }
#define PLAIN(NAME, T)                                                                            \
    extern "C" void gated_##NAME(const T *gate, const T *up, T *y, int64_t rows, int64_t width,   \
                                 int64_t stride, float m, float c, int threads) {                 \
        gated(gate, up, y, rows, width, stride, m, c, threads);                                   \
    }                                                                                             \
    extern "C" void gated_backward_##NAME(const T *grad, const T *gate, const T *up,              \
                                          T *gate_grad, T *up_grad, int64_t count, float m,       \
                                          float c, int threads) {                                 \
        gated_backward(grad, gate, up, gate_grad, up_grad, count, m, c, threads);                 \
    }                                                                                             \
    extern "C" void attention_backward_##NAME(                                                    \
        const float *scores, const float *share_grads, const float *weights,                      \
        const float *deltas, T *shares, T *score_grads, const int64_t *prompts,                   \
        const int64_t *lengths, int64_t first, int64_t count, int64_t per_row, int64_t group,     \
        int64_t tokens, int64_t columns, int64_t prompt_columns, int64_t window, float scaling,   \
        int threads) {                                                                            \
        const Sight the = {per_row, group,  tokens,  columns,                                     \
                           prompt_columns, window, prompts, lengths};                             \
        attention_backward(scores, share_grads, weights, deltas, shares, score_grads, first,      \
                           count, scaling, the, threads);                                         \
    }                                                                                             \
    extern "C" void decode_##NAME(                                                                \
        const T *query, const T *key, const T *value, T *keys, T *values, const T *prompt_keys,   \
        const T *prompt_values, T *y, const int64_t *lengths, const int64_t *owners,              \
        const int64_t *prompt_lengths, int64_t rows, int64_t heads, int64_t group, int64_t dim,   \
        int64_t width, int64_t column, int64_t prompt_width, int64_t window, float scaling,       \
        float softcap, int threads) {                                                             \
        decode_of_size<T>({query, key, value, keys, values, prompt_keys, prompt_values, y,        \
                           lengths, owners, prompt_lengths, rows, heads, group, dim, width,       \
                           column, prompt_width, window, scaling, softcap},                       \
                          threads);                                                               \
    }

NORM(fff, float, float, float)
NORM(bbb, bf16, bf16, bf16)
NORM(bff, bf16, float, float)
NORM(bfb, bf16, float, bf16)
ROTATE(fff, float, float, float)
ROTATE(bbb, bf16, bf16, bf16)
ROTATE(bff, bf16, float, float)
ROTATE(ffb, float, float, bf16)
PLAIN(f, float)
PLAIN(b, bf16)
