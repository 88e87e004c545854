// The backward of attention, between its products of matrices.
//
// As in layers.cpp, ops.py checks what it hands over.

#include "arguments.h"
#include "numbers.h"

namespace {

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
    }

ATTENTION(f, float)
ATTENTION(b, bf16)
