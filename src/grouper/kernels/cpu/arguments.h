// What Python hands to a kernel: its pointers, then its numbers, eight bytes each.
//
// One shape for all kernels, so that a recorded step (tape.cpp) can call any of them.

#pragma once

#include <cstdint>

union Argument {
    void *pointer;
    int64_t whole;
    double real;
};

// Takes them in order.
class Arguments {
  public:
    explicit Arguments(const Argument *first) : next_(first) {}

    template <class T> T *pointer() { return static_cast<T *>((next_++)->pointer); }
    int64_t whole() { return (next_++)->whole; }
    float real() { return static_cast<float>((next_++)->real); }
    int count() { return static_cast<int>(whole()); }
    bool flag() { return whole() != 0; }

  private:
    const Argument *next_;
};

#define KERNEL(NAME) extern "C" void NAME(const Argument *first)
