// Numbers of a float or bf16 tensor, whose sums are made in float, and e^x.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(bf16 x) {
    const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline void store(float &place, float value) { place = value; }
inline void store(bf16 &place, float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const bool number = (wide & 0x7fffffffu) <= 0x7f800000u;
    place.bits = static_cast<uint16_t>(number ? rounded : 0x7fc0u);
}

// The value that storing it in a T leaves.
template <class T> inline float rounded(float value) {
    T place;
    store(place, value);
    return load(place);
}

// e^x to 2 units in the last place, written so that compilers turn a loop of it into vector code:
// e^x = 2^k e^r with |r| <= ln(2)/2, and Taylor's polynomial for e^r.
inline float exponential(float x) {
    const float low = x < -80.0f ? -80.0f : x;
    const float bounded = low > 80.0f ? 80.0f : low;
    const float k = std::floor(bounded * 1.44269504f + 0.5f);
    const float r = (bounded - k * 0.693145752f) - k * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t power = (static_cast<int32_t>(k) + 127) * (1 << 23);
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;  // not a number stays so: p comes from x
}

}  // namespace
