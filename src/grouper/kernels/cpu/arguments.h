// What Python hands to a kernel: its pointers, then its numbers, eight bytes each.
//
// One shape for all kernels, so that a recorded step (graph.cpp) can call any of them.

#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

union Argument {
    void *pointer;
    int64_t whole;
    double real;
};

// The next argument as the type that a function wants.
template <class T> T take(const Argument *&next) {
    const Argument &given = *next++;
    if constexpr (std::is_pointer_v<T>)
        return static_cast<T>(given.pointer);
    else if constexpr (std::is_floating_point_v<T>)
        return static_cast<T>(given.real);
    else
        return static_cast<T>(given.whole);
}

// Calls a function with the arguments from here on; braces take them in order.
template <class... Types> void pass(void (*function)(Types...), const Argument *next) {
    std::apply(function, std::tuple<Types...>{take<Types>(next)...});
}

// A function under the name that Python calls it by.
#define KERNEL(NAME, ...) \
    extern "C" void NAME(const Argument *first) { pass(__VA_ARGS__, first); }
