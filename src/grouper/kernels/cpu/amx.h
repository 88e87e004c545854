// Intel's matrix unit: products of tiles of 16 rows of 64 bytes, summed up in float.

#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

// Whether this process may use tiles; Linux wants to be asked once.
inline bool tiles_are_granted() {
    constexpr int request = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
    return granted;
}

// To be called between writing memory in the ordinary way and loading a tile or shapes from it: GCC's
// intrinsics do not say that they read memory, so the writing could be moved behind them or left out.
inline void written(const void *place) { __asm__ volatile("" : : "r"(place) : "memory"); }

// The shapes of the eight tiles, as the processor reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int height, int width) {
        rows[tile] = static_cast<uint8_t>(height);
        bytes[tile] = static_cast<uint16_t>(width);
    }

    void use() const {
        written(this);
        _tile_loadconfig(this);
    }
};

}  // namespace

#endif
