// One token per row by the inverse of its cumulative distribution, as sampling/draw.py does it.

#include <cstdlib>

#include "arguments.h"
#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;
// e^-80 of the most likely token's share is nothing; `exponential` goes no lower.
constexpr float LEAST = -80.0f;

struct Draw {
    const float *logits, *uniform, *temperature;
    const bool *early, *stops;  // early may be null: no row is
    int64_t *tokens;
    float *logprobs, *entropies;
    int64_t rows, vocabulary, stride, threads;

    void run() const {
        const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            double *sums = static_cast<double *>(
                std::malloc(sizeof(double) * blocks + sizeof(float) * vocabulary));
            float *shares = reinterpret_cast<float *>(sums + blocks);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < rows; ++i) row(i, shares, sums);
            std::free(sums);
        }
    }

    // `shares` [vocabulary] and `sums` [blocks] are room to work in.
    void row(int64_t i, float *__restrict shares, double *sums) const {
        const float *logit = logits + i * stride;
        const bool greedy = temperature[i] == 0;
        const float heat = greedy ? 1.0f : temperature[i];
        float top = logit[0] / heat;
#pragma omp simd reduction(max : top)
        for (int64_t v = 0; v < vocabulary; ++v)
            top = logit[v] / heat > top ? logit[v] / heat : top;
        double total = 0, spread = 0;
        for (int64_t start = 0; start < vocabulary; start += BLOCK) {
            const int64_t end = start + BLOCK < vocabulary ? start + BLOCK : vocabulary;
            float sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
            for (int64_t v = start; v < end; ++v) {
                const float below = logit[v] / heat - top;
                shares[v] = below < LEAST ? 0.0f : exponential(below);
                sum += shares[v];
                // A logit of minus infinity has no share, and would make this no number.
                weighted += below < LEAST ? 0.0f : shares[v] * below;
            }
            sums[start / BLOCK] = sum;
            total += sum;
            spread += weighted;
        }
        const bool banned = early != nullptr && early[i];
        const double mass = banned && !greedy ? left(logit, heat, shares, sums) : total;
        const auto token = greedy ? highest(logit, banned) : drawn(shares, sums, mass, uniform[i]);
        tokens[i] = token;
        logprobs[i] = (logit[token] / heat - top) - static_cast<float>(std::log(total));
        // H = log(sum e^z) - sum p z, with the highest z subtracted from both.
        entropies[i] = static_cast<float>(std::log(total) - spread / total);
    }

    int64_t highest(const float *logit, bool banned) const {
        int64_t best = -1;
        for (int64_t v = 0; v < vocabulary; ++v)
            if (!(banned && stops[v]) && (best < 0 || logit[v] > logit[best])) best = v;
        return best < 0 ? 0 : best;
    }

    // The shares of what is not banned, and their sums, relative to the most likely of these:
    // beside a stop token that is all but certain, they would be lost in rounding.
    double left(const float *logit, float heat, float *shares, double *sums) const {
        const float best = logit[highest(logit, true)] / heat;
        double total = 0;
        for (int64_t v = 0; v < vocabulary; ++v) {
            const float below = logit[v] / heat - best;
            shares[v] = !stops[v] && below >= LEAST ? exponential(below) : 0.0f;
            sums[v / BLOCK] = (v % BLOCK == 0 ? 0.0 : sums[v / BLOCK]) + shares[v];
            total += shares[v];
        }
        return total;
    }

    int64_t drawn(const float *shares, const double *sums, double total, float uniform) const {
        const double wanted = uniform * total;
        const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
        double before = 0;
        int64_t block = 0;
        while (block + 1 < blocks && !(before + sums[block] > wanted)) before += sums[block++];
        int64_t last = -1;
        for (int64_t v = block * BLOCK; v < vocabulary; ++v) {
            if (!(shares[v] > 0)) continue;
            last = v;
            before += shares[v];
            if (before > wanted) return v;
        }
        // Rounding has left no token above the wanted share: take the last one that may be drawn.
        for (int64_t v = block * BLOCK - 1; last < 0 && v >= 0; --v)
            if (shares[v] > 0) last = v;
        return last < 0 ? vocabulary - 1 : last;
    }
};

}  // namespace

KERNEL(draw_f, Draw)
