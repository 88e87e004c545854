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

}  // namespace

// One name for each combination of types: f is float, b is bf16, in the order of the template.
#define NORM(NAME, X, W, Y)                                                                       \
    KERNEL(rms_norm_##NAME) {                                                                     \
        Arguments a(first);                                                                       \
        const X *x = a.pointer<X>();                                                              \
        const W *w = a.pointer<W>();                                                              \
        Y *y = a.pointer<Y>();                                                                    \
        float *inverse = a.pointer<float>();                                                      \
        const int64_t rows = a.whole(), width = a.whole();                                        \
        const float eps = a.real();                                                               \
        const bool ones = a.flag();                                                               \
        rms_norm(x, w, y, inverse, rows, width, eps, ones, a.count());                            \
    }                                                                                             \
    KERNEL(rms_norm_backward_##NAME) {                                                            \
        Arguments a(first);                                                                       \
        const Y *grad = a.pointer<Y>();                                                           \
        const X *x = a.pointer<X>();                                                              \
        const W *w = a.pointer<W>();                                                              \
        const float *inverse = a.pointer<float>();                                                \
        X *x_grad = a.pointer<X>();                                                               \
        float *w_grad = a.pointer<float>();                                                       \
        const int64_t rows = a.whole(), width = a.whole();                                        \
        const bool ones = a.flag();                                                               \
        rms_norm_backward(grad, x, w, inverse, x_grad, w_grad, rows, width, ones, a.count());     \
    }
#define ROTATE(NAME, X, C, Y)                                                                     \
    KERNEL(rotate_##NAME) {                                                                       \
        Arguments a(first);                                                                       \
        const X *x = a.pointer<X>();                                                              \
        const C *cosine = a.pointer<C>(), *sine = a.pointer<C>();                                 \
        Y *y = a.pointer<Y>();                                                                    \
        const int64_t tokens = a.whole(), heads = a.whole(), dim = a.whole();                     \
        const int64_t token_stride = a.whole(), head_stride = a.whole();                          \
        const bool backward = a.flag();                                                           \
        rotate(x, cosine, sine, y, tokens, heads, dim, token_stride, head_stride, backward,       \
               a.count());                                                                        \
    }
#define GATED(NAME, T)                                                                            \
    KERNEL(gated_##NAME) {                                                                        \
        Arguments a(first);                                                                       \
        const T *gate = a.pointer<T>(), *up = a.pointer<T>();                                     \
        T *y = a.pointer<T>();                                                                    \
        const int64_t count = a.whole();                                                          \
        const float m = a.real(), c = a.real();                                                   \
        gated(gate, up, y, count, m, c, a.count());                                               \
    }                                                                                             \
    KERNEL(gated_backward_##NAME) {                                                               \
        Arguments a(first);                                                                       \
        const T *grad = a.pointer<T>(), *gate = a.pointer<T>(), *up = a.pointer<T>();             \
        T *gate_grad = a.pointer<T>(), *up_grad = a.pointer<T>();                                 \
        const int64_t count = a.whole();                                                          \
        const float m = a.real(), c = a.real();                                                   \
        gated_backward(grad, gate, up, gate_grad, up_grad, count, m, c, a.count());               \
    }                                                                                             \
    KERNEL(add_##NAME) {                                                                          \
        Arguments a(first);                                                                       \
        const T *one = a.pointer<T>(), *other = a.pointer<T>();                                   \
        T *y = a.pointer<T>();                                                                    \
        const int64_t count = a.whole();                                                          \
        add(one, other, y, count, a.count());                                                     \
    }

NORM(fff, float, float, float)
NORM(bbb, bf16, bf16, bf16)
NORM(bff, bf16, float, float)
NORM(bfb, bf16, float, bf16)
ROTATE(fff, float, float, float)
ROTATE(bbb, bf16, bf16, bf16)
ROTATE(bff, bf16, float, float)
ROTATE(ffb, float, float, bf16)
GATED(f, float)
GATED(b, bf16)
