// Attention of one new token a row over its prompt and what it has written itself.
//
// As in layers.cpp, ops.py checks what it hands over.

#include <vector>

#include "arguments.h"
#include "numbers.h"
#include "wide.h"

namespace {

// One key head's queries over its keys and values. D is the size of a head where it is a usual one,
// so that loops are unrolled and sums stay in registers, and 0 elsewhere.
template <class T, int64_t D> class Plain {
  public:
    Plain(int64_t group, int64_t dim)
        : group_(group), dim_(D > 0 ? D : dim), out_(static_cast<size_t>(group * dim)) {}

    void begin(const T *queries) {
        queries_ = queries;
        std::memset(out_.data(), 0, sizeof(float) * out_.size());
    }

    // Products of a run of keys with each query, whose scores lie `most` apart. What lies `ahead`,
    // as many lines, is read next.
    void scores(const T *keys, const T *ahead, int64_t count, float *score, int64_t most) const {
        (void)ahead;
        const int64_t size = D > 0 ? D : dim_;
        for (int64_t g = 0; g < group_; ++g) {
            const T *query = queries_ + g * size;
            for (int64_t k = 0; k < count; ++k) {
                const T *key = keys + k * size;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < size; ++d) sum += load(query[d]) * load(key[d]);
                score[g * most + k] = sum;
            }
        }
    }

    // Adds a run of values to each query's output, weighted by its shares, which lie `most` apart.
    void add(const float *share, int64_t most, const T *values, const T *ahead, int64_t count) {
        (void)ahead;
        int64_t g = 0;
        for (; g + 2 <= group_; g += 2) add_some<2>(share + g * most, most, values, count, g);
        if (g < group_) add_some<1>(share + g * most, most, values, count, g);
    }

    void finish(T *y) const {
        for (int64_t i = 0; i < group_ * dim_; ++i) store(y[i], out_[i]);
    }

  private:
    // Two queries at a time take half the loads.
    template <int Q>
    void add_some(const float *share, int64_t most, const T *values, int64_t count, int64_t g) {
        const int64_t size = D > 0 ? D : dim_;
        float held[Q * (D > 0 ? D : 1)];
        float *out = out_.data() + g * size;
        float *sum = D > 0 ? held : out;
        if (D > 0) std::memcpy(held, out, sizeof held);
        for (int64_t k = 0; k < count; ++k) {
            const T *value = values + k * size;
#pragma omp simd
            for (int64_t d = 0; d < size; ++d) {
                const float one = load(value[d]);
                for (int q = 0; q < Q; ++q) sum[q * size + d] += share[q * most + k] * one;
            }
        }
        if (D > 0) std::memcpy(out, held, sizeof held);
    }

    int64_t group_, dim_;
    const T *queries_ = nullptr;
    std::vector<float> out_;
};

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
template <class Worker, class T> void decode(const Decode<T> &the, int threads) {
    const int64_t dim = the.dim, places = the.rows * the.heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t most = the.prompt_width + the.width;
        std::vector<float> scores(static_cast<size_t>(the.group * most));
        Worker worker(the.group, dim);
        // In turns, since rows that began together are equally long: every thread gets as much.
#pragma omp for schedule(static, 1)
        for (int64_t place = 0; place < places; ++place) {
            const int64_t now = (place * the.width + the.column) * dim;
            std::memcpy(the.keys + now, the.key + place * dim, sizeof(T) * dim);
            std::memcpy(the.values + now, the.value + place * dim, sizeof(T) * dim);
            Run<T> runs[3];
            const int64_t parts = the.runs_of(place, runs);
            Run<T> next[3];
            const bool more = place + threads < places;
            const int64_t coming = more ? the.runs_of(place + threads, next) : 0;
            worker.begin(the.query + place * the.group * dim);
            int64_t found = 0;
            for (int64_t part = 0; part < parts; found += runs[part++].count) {
                const Run<T> &run = runs[part];
                worker.scores(run.keys, run.values, run.count, scores.data() + found, most);
            }
            for (int64_t g = 0; g < the.group; ++g)
                softmax(scores.data() + g * most, found, the.scaling, the.softcap);
            found = 0;
            for (int64_t part = 0; part < parts; found += runs[part++].count) {
                const Run<T> &run = runs[part];
                const T *ahead = part < coming ? next[part].keys : run.values;
                worker.add(scores.data() + found, most, run.values, ahead, run.count);
            }
            worker.finish(the.y + place * the.group * dim);
        }
    }
}

// The best worker for heads of this size and type.
template <int64_t D> void decode_of(const Decode<float> &the, int threads) {
    decode<Plain<float, D>>(the, threads);
}

template <int64_t D> void decode_of(const Decode<bf16> &the, int threads) {
#if defined(HAS_WIDE)
    if constexpr (D > 0) return decode<Wide<D>>(the, threads);
#endif
    decode<Plain<bf16, D>>(the, threads);
}

template <class T> void decode_of_size(const Decode<T> &the, int threads) {
    if (the.dim == 32) return decode_of<32>(the, threads);
    if (the.dim == 64) return decode_of<64>(the, threads);
    if (the.dim == 128) return decode_of<128>(the, threads);
    decode_of<0>(the, threads);
}

}  // namespace

// f is float, b is bf16.
#define DECODE(NAME, T)                                                                           \
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

DECODE(f, float)
DECODE(b, bf16)
