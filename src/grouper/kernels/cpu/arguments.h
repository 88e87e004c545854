// What Python hands to a kernel: its pointers, then its numbers, eight bytes each.
//
// A kernel is a struct of such members, whose `run` does the work. One shape for all of them, so
// that a recorded step (graph.py) can call any.

#pragma once

#include <cstdint>
#include <cstring>

// A kernel under the name that Python calls it by.
#define KERNEL(NAME, ...)                                  \
    extern "C" void NAME(const void *arguments) {          \
        __VA_ARGS__ kernel;                                \
        std::memcpy(&kernel, arguments, sizeof kernel);    \
        kernel.run();                                      \
    }
