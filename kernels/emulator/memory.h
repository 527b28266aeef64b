// When do copies and plain accesses reach memory? A cp.async lands at its issue or only at its wait, by the seed.
// Shared words go through the shadow. Vectors stored to global memory are noted, and two threads that store to one
// place (of different blocks, or of one block with no barrier between) are found when the launch ends.
#pragma once

#include "shadow.h"

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace smelt::emulator {

inline void land(Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  size_t bytes = static_cast<size_t>(copy.bytes);
  unsigned char* target = current->shared + copy.offset;
  if (bytes) memcpy(target, copy.global, bytes);
  memset(target + bytes, 0, 16 - bytes);
}

inline void check_global(const void* global, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(global) % alignment)
    fail("%s of a global address that is not a multiple of %zu", current->running->operation.name, alignment);
}

inline void note_store(const void* global, int bytes) {
  Block& block = *current;
  block.stores.push_back({reinterpret_cast<uintptr_t>(global), block.number, bytes, block.interval, block.running->id});
}

}  // namespace smelt::emulator

namespace smelt {

inline uint32_t bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void copy_async16(void* shared, const void* global, int bytes, emulator::Where where = emulator::here()) {
  emulator::Block& block = *emulator::current;
  emulator::CudaThread& thread = emulator::begin("cp.async", where);
  if (bytes < 0 || bytes > 16) emulator::fail("cp.async of %d bytes", bytes);
  emulator::check_global(global, 16);
  size_t offset = emulator::shared_offset(shared, 16, 16);
  emulator::write_shared(offset, 16, true);
  block.counts.copied_bytes += bytes;
  thread.copies.push_back({offset, global, bytes, false});
  if (block.random() & 1) emulator::land(thread.copies.back());
}

inline void commit_copies() {
  emulator::CudaThread& thread = *emulator::current->running;
  int grouped = 0;
  for (int size : thread.groups) grouped += size;
  thread.groups.push_back(static_cast<int>(thread.copies.size()) - grouped);
}

template <int N>
inline void wait_copies() {
  emulator::CudaThread& thread = *emulator::current->running;
  if (thread.groups.size() <= static_cast<size_t>(N)) return;
  auto kept = thread.groups.end() - N;
  int done = 0;
  for (auto group = thread.groups.begin(); group != kept; ++group) done += *group;
  for (int i = 0; i < done; ++i) {
    emulator::land(thread.copies[static_cast<size_t>(i)]);
    emulator::copy_landed(thread.copies[static_cast<size_t>(i)].offset);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + done);
  thread.groups.erase(thread.groups.begin(), kept);
}

inline void store_shared(int* shared, int value, emulator::Where where = emulator::here()) {
  emulator::begin("st.shared", where);
  emulator::write_shared(emulator::shared_offset(shared, 4, 4), 4, false);
  *shared = value;
}

inline int load_shared(const int* shared, emulator::Where where = emulator::here()) {
  emulator::begin("ld.shared", where);
  emulator::read_shared(emulator::shared_offset(shared, 4, 4), 4);
  return *shared;
}

inline uint32_t load4(const void* global, emulator::Where where = emulator::here()) {
  emulator::begin("ld.global.b32", where);
  emulator::check_global(global, 4);
  return *static_cast<const uint32_t*>(global);
}

inline uint4 load16(const void* global, emulator::Where where = emulator::here()) {
  emulator::begin("ld.global.v4.b32", where);
  emulator::check_global(global, 16);
  return *static_cast<const uint4*>(global);
}

inline void store4(void* global, uint32_t value, emulator::Where where = emulator::here()) {
  emulator::begin("st.global.b32", where);
  emulator::check_global(global, 4);
  emulator::note_store(global, 4);
  *static_cast<uint32_t*>(global) = value;
}

inline void store8(void* global, uint32_t x, uint32_t y, emulator::Where where = emulator::here()) {
  emulator::begin("st.global.v2.b32", where);
  emulator::check_global(global, 8);
  emulator::note_store(global, 8);
  static_cast<uint32_t*>(global)[0] = x;
  static_cast<uint32_t*>(global)[1] = y;
}

inline void store8(void* global, float x, float y, emulator::Where where = emulator::here()) {
  store8(global, bits(x), bits(y), where);
}

inline void store16(void* global, uint4 value, emulator::Where where = emulator::here()) {
  emulator::begin("st.global.v4.b32", where);
  emulator::check_global(global, 16);
  emulator::note_store(global, 16);
  *static_cast<uint4*>(global) = value;
}

}  // namespace smelt
