// The instructions of the matrix unit (AMX) that the kernels use, in AVX-512 with bf16. Included before the sources, so
// that a processor without the unit can test the code for it.

#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define syscall(...) 0  // the request for permission to use the unit succeeds

struct EmulatedTiles {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  alignas(64) uint8_t rows[8][16][64];

  void configure(const void* from) {
    std::memcpy(&config, from, sizeof(config));
    std::memset(rows, 0, sizeof(rows));
  }
  void release() { std::memset(&config, 0, sizeof(config)); }
  void clear(int tile) { std::memset(rows[tile], 0, sizeof(rows[tile])); }
  void load(int tile, const void* from, int64_t stride) {
    clear(tile);
    for (int i = 0; i < config.rows[tile]; ++i)
      std::memcpy(rows[tile][i], static_cast<const uint8_t*>(from) + i * stride, config.row_bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int i = 0; i < config.rows[tile]; ++i)
      std::memcpy(static_cast<uint8_t*>(to) + i * stride, rows[tile][i], config.row_bytes[tile]);
  }
  void multiply(int sums, int a, int b) {
    if (config.row_bytes[a] != 4 * config.rows[b] || config.rows[a] != config.rows[sums] ||
        config.row_bytes[b] != config.row_bytes[sums])
      __builtin_trap();
    for (int i = 0; i < config.rows[a]; ++i) {
      __m512 row = _mm512_load_ps(rows[sums][i]);
      for (int pair = 0; pair < config.rows[b]; ++pair) {
        int32_t of_a;
        std::memcpy(&of_a, rows[a][i] + 4 * pair, 4);
        row = _mm512_dpbf16_ps(row, (__m512bh)_mm512_load_si512(rows[b][pair]), (__m512bh)_mm512_set1_epi32(of_a));
      }
      _mm512_store_ps(rows[sums][i], row);
    }
  }
};

inline EmulatedTiles& emulated_tiles() {
  thread_local EmulatedTiles tiles = {};
  return tiles;
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_tiles().configure(from)
#define _tile_release() emulated_tiles().release()
#define _tile_zero(tile) emulated_tiles().clear(tile)
#define _tile_loadd(tile, from, stride) emulated_tiles().load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tiles().store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_tiles().multiply(sums, a, b)
