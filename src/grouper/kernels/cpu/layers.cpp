// What a model does to its numbers between two matrix products, in one pass over memory each.
//
// Every kernel is called from ops.py, which checks types, shapes and layouts; nothing is checked
// here. T is float or bf16. Rounding to bf16 happens where the model's own code rounds, so that
// both agree to the last bit or two.

#include "arguments.h"
#include "numbers.h"

namespace {

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

template <class T>
void gated(const T *__restrict gate, const T *__restrict up, T *__restrict y, int64_t count,
           float m, float c, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = start + BLOCK < count ? start + BLOCK : count;
#pragma omp simd
        for (int64_t i = start; i < end; ++i) {
            const float g = load(gate[i]);
            const float share = 1.0f / (1.0f + exponential(-(m * g + c * g * g * g)));
            store(y[i], rounded<T>(g * share) * load(up[i]));
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

// ---- sum ---------------------------------------------------------------------------------------

template <class T>
void add(const T *__restrict one, const T *__restrict other, T *__restrict y, int64_t count,
         int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = start + BLOCK < count ? start + BLOCK : count;
#pragma omp simd
        for (int64_t i = start; i < end; ++i) store(y[i], load(one[i]) + load(other[i]));
    }
}

// ---- the backward of attention, between its products -------------------------------------------

// Scores and gradients of the shares [count, group, tokens, columns], log-sum-exps and deltas (the
// gradient times the output, summed) [count, group, tokens] -> shares and gradients of the scores,
// zero where nothing is seen: `width` tokens at most (0: all), of the row's prompt and, causally, of
// its own. Block i belongs to row (first + i) / per_row.
template <class T>
void attention_backward(const float *scores, const float *share_grads, const float *weights,
                        const float *deltas, T *shares, T *score_grads, const int64_t *prompts,
                        const int64_t *lengths, int64_t first, int64_t count, int64_t per_row,
                        int64_t group, int64_t tokens, int64_t columns, int64_t prompt_columns,
                        int64_t width, float scaling, int threads) {
    const int64_t lines = group * tokens;
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
                const float p = exponential(score[i] * scaling - weight);
                store(share[i], p);
                store(out[i], p * (grad[i] - delta) * scaling);
            }
        }
    }
}

}  // namespace

// One name for each combination of types: f is float, b is bf16, in the order of the template.
#define NORM(NAME, ...)                                                                           \
    KERNEL(rms_norm_##NAME, rms_norm<__VA_ARGS__>)                                                \
    KERNEL(rms_norm_backward_##NAME, rms_norm_backward<__VA_ARGS__>)
#define ROTATE(NAME, ...) KERNEL(rotate_##NAME, rotate<__VA_ARGS__>)
#define OTHERS(NAME, T)                                                                           \
    KERNEL(gated_##NAME, gated<T>)                                                                \
    KERNEL(gated_backward_##NAME, gated_backward<T>)                                              \
    KERNEL(add_##NAME, add<T>)                                                                    \
    KERNEL(attention_backward_##NAME, attention_backward<T>)

NORM(fff, float, float, float)
NORM(bbb, bf16, bf16, bf16)
NORM(bff, bf16, float, float)
NORM(bfb, bf16, float, bf16)
ROTATE(fff, float, float, float)
ROTATE(bbb, bf16, bf16, bf16)
ROTATE(bff, bf16, float, float)
ROTATE(ffb, float, float, bf16)
OTHERS(f, float)
OTHERS(b, bf16)
