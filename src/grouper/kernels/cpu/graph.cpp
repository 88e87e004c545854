// A run of kernel calls that were recorded, without Python in between.

#include "arguments.h"

struct Entry {
    void (*kernel)(const Argument *);
    const Argument *arguments;
};

extern "C" void play(const Entry *entries, int64_t count) {
    for (int64_t i = 0; i < count; ++i) entries[i].kernel(entries[i].arguments);
}
