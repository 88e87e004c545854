// What a model does to its numbers between two matrix products, in one pass over memory each.
//
// Every kernel is called from ops.py or attention.py, which check types, shapes and layouts;
// nothing is checked here. T is float or bf16. Rounding to bf16 happens where the model's own code
// rounds, so that both agree to the last bit or two.

#include "arguments.h"
#include "numbers.h"

namespace {

// ---- RMS normalization -------------------------------------------------------------------------

// One over the root of a row's mean square.
template <class X> inline float inverse_root(const X *in, int64_t width, double eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += load(in[i]) * load(in[i]);
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + static_cast<float>(eps));
}

// `ones`: the weight is 1 + w and multiplied before rounding (Gemma); otherwise w, after (Llama).
template <class X, class W, class Y> struct Norm {
    const X *x;
    const W *w;
    Y *y;
    int64_t rows, width;
    double eps;
    int64_t ones, threads;

    void run() const {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t row = 0; row < rows; ++row) {
            const X *in = x + row * width;
            Y *out = y + row * width;
            const float scale = inverse_root(in, width, eps);
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
};

// `w_grad`: [threads, width], zeros; thread t adds up rows t * rows / threads onwards.
template <class X, class W, class Y> struct NormGradient {
    const Y *grad;
    const X *x;
    const W *w;
    X *x_grad;
    float *w_grad;
    int64_t rows, width;
    double eps;
    int64_t ones, threads;

    void run() const {
        const float one = ones ? 1.0f : 0.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
        for (int64_t t = 0; t < threads; ++t) {
            float *own = w_grad + t * width;
            for (int64_t row = t * rows / threads; row < (t + 1) * rows / threads; ++row) {
                const X *in = x + row * width;
                const Y *g = grad + row * width;
                X *out = x_grad + row * width;
                const float scale = inverse_root(in, width, eps);
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
};

// ---- rotary embedding --------------------------------------------------------------------------

// x [tokens, heads, dim] with strides, cosine and sine [tokens, dim] -> y contiguous.
template <class X, class C, class Y> struct Rotate {
    const X *x;
    const C *cosine, *sine;
    Y *y;
    int64_t tokens, heads, dim, token_stride, head_stride, threads;

    void run() const {
        const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t token = 0; token < tokens; ++token) {
            const C *c = cosine + token * dim, *s = sine + token * dim;
            for (int64_t head = 0; head < heads; ++head) {
                const X *in = x + token * token_stride + head * head_stride;
                Y *out = y + (token * heads + head) * dim;
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = load(in[i]), b = load(in[i + half]);
                    store(out[i], a * load(c[i]) - b * load(s[i]));
                    store(out[i + half], b * load(c[i + half]) + a * load(s[i + half]));
                }
            }
        }
    }
};

// ---- gated activation --------------------------------------------------------------------------

// x * sigmoid(m x + c x^3): SiLU with m = 1, c = 0; GELU's tanh form with m = sqrt(8 / pi) and
// c = 0.044715 m, since (1 + tanh(z)) / 2 = sigmoid(2 z).
inline float open_share(float g, float m, float c) {
    return 1.0f / (1.0f + exponential(-(m * g + c * g * g * g)));
}

template <class T> struct Gate {
    const T *gate, *up;
    T *y;
    int64_t count;
    double m, c;
    int64_t threads;

    void run() const {
        const float linear = static_cast<float>(m), cubic = static_cast<float>(c);
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1)
        for (int64_t i = 0; i < count; ++i) {
            const float g = load(gate[i]);
            store(y[i], rounded<T>(g * open_share(g, linear, cubic)) * load(up[i]));
        }
    }
};

template <class T> struct GateGradient {
    const T *grad, *gate, *up;
    T *gate_grad, *up_grad;
    int64_t count;
    double m, c;
    int64_t threads;

    void run() const {
        const float linear = static_cast<float>(m), cubic = static_cast<float>(c);
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1)
        for (int64_t i = 0; i < count; ++i) {
            const float g = load(gate[i]), d = load(grad[i]);
            const float share = open_share(g, linear, cubic);
            const float bend = linear + 3.0f * cubic * g * g;
            store(gate_grad[i], d * load(up[i]) * (share + g * share * (1.0f - share) * bend));
            store(up_grad[i], d * rounded<T>(g * share));
        }
    }
};

// ---- the backward of attention, between its products -------------------------------------------

// Scores and gradients of the shares [count, group, tokens, columns], log-sum-exps and deltas (the
// gradient times the output, summed) [count, group, tokens] -> shares and gradients of the scores,
// zero where nothing is seen: `width` tokens at most (0: all), of the row's prompt and, causally, of
// its own. Block i belongs to row (first + i) / per_row.
template <class T> struct AttentionGradient {
    const float *scores, *share_grads, *weights, *deltas;
    T *shares, *score_grads;
    const int64_t *prompts, *lengths;
    int64_t first, count, per_row, group, tokens, columns, prompt_columns, width;
    double scaling;
    int64_t threads;

    void run() const {
        const int64_t lines = group * tokens;
        const float factor = static_cast<float>(scaling);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 16)
        for (int64_t line = 0; line < count * lines; ++line) {
            const int64_t row = (first + line / lines) / per_row, token = line % tokens;
            T *share = shares + line * columns, *out = score_grads + line * columns;
            std::memset(share, 0, sizeof(T) * columns);
            std::memset(out, 0, sizeof(T) * columns);
            if (token >= lengths[row]) continue;
            const float *score = scores + line * columns;
            const float *grad = share_grads + line * columns;
            const float weight = weights[line], delta = deltas[line];
            const int64_t prompt = prompts[row];
            const int64_t window = width > 0 ? width : prompt + token + 1;
            const int64_t old = prompt + token + 1 - window;
            const int64_t starts[2] = {old > 0 ? old : 0,
                                       prompt_columns + (old > prompt ? old - prompt : 0)};
            const int64_t ends[2] = {prompt, prompt_columns + token + 1};
            for (int part = 0; part < 2; ++part) {
#pragma omp simd
                for (int64_t i = starts[part]; i < ends[part]; ++i) {
                    const float p = exponential(score[i] * factor - weight);
                    store(share[i], p);
                    store(out[i], p * (grad[i] - delta) * factor);
                }
            }
        }
    }
};

}  // namespace

// One name for each combination of types: f is float, b is bf16, in the order of the template.
#define NORM(NAME, ...)                         \
    KERNEL(rms_norm_##NAME, Norm<__VA_ARGS__>)  \
    KERNEL(rms_norm_backward_##NAME, NormGradient<__VA_ARGS__>)
#define OTHERS(NAME, T)                            \
    KERNEL(gated_##NAME, Gate<T>)                  \
    KERNEL(gated_backward_##NAME, GateGradient<T>) \
    KERNEL(attention_backward_##NAME, AttentionGradient<T>)

NORM(fff, float, float, float)
NORM(bbb, bf16, bf16, bf16)
NORM(bff, bf16, float, float)
NORM(bfb, bf16, float, bf16)
KERNEL(rotate_fff, Rotate<float, float, float>)
KERNEL(rotate_bbb, Rotate<bf16, bf16, bf16>)
KERNEL(rotate_bff, Rotate<bf16, float, float>)
KERNEL(rotate_ffb, Rotate<float, float, bf16>)
OTHERS(f, float)
OTHERS(b, bf16)
