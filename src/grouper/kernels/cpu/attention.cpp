// The backward of attention, between its products of matrices.
//
// As in layers.cpp, ops.py checks what it hands over.

#include "arguments.h"
#include "numbers.h"

namespace {

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

// f is float, b is bf16.
KERNEL(attention_backward_f, attention_backward<float>)
KERNEL(attention_backward_b, attention_backward<bf16>)
