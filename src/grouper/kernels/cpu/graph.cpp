// A run of kernel calls that were recorded, without Python in between.

#include <cstdint>

struct Entry {
    void (*kernel)(const void *);
    const void *arguments;
};

extern "C" void play(const Entry *entries, int64_t count) {
    for (int64_t i = 0; i < count; ++i) entries[i].kernel(entries[i].arguments);
}
