// Who may touch a word of shared memory now? Beside every 4 bytes stand the last write and read with their barrier
// intervals, the copies on their way into it and the wgmma that still read it. Two accesses of one interval by two
// threads, one of them a write, are a race whatever the order was this time.
//
// A wgmma reads through another path (the asynchronous proxy) and sees what a thread wrote only if that thread executed
// fence.proxy.async after the write and a barrier came after the fence. Writes carry the number `write_number`, which
// every fence raises: a write is visible if the writer's last fence before this interval has a larger number.
#pragma once

#include "block.h"

namespace smelt::emulator {

constexpr int16_t SEVERAL = -2;  // more than one thread has read

inline size_t shared_offset(const void* address, size_t bytes, size_t alignment) {
  Block& block = *current;
  intptr_t offset =
      static_cast<intptr_t>(reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(block.shared));
  if (offset < 0 || static_cast<size_t>(offset) + bytes > block.shared_bytes)
    fail("%s touches shared byte %lld, but the block has %zu bytes", block.running->operation.name,
         static_cast<long long>(offset), block.shared_bytes);
  if (static_cast<size_t>(offset) % alignment)
    fail("%s touches shared byte %lld, which is not a multiple of %zu", block.running->operation.name,
         static_cast<long long>(offset), alignment);
  return static_cast<size_t>(offset);
}

inline void read_shared(size_t offset, size_t bytes) {
  Block& block = *current;
  int16_t me = static_cast<int16_t>(block.running->id);
  const char* name = block.running->operation.name;
  for (size_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
    Shadow& shadow = block.shadow[word];
    if (shadow.copies)
      fail("%s reads shared byte %zu while a cp.async of thread %d into it is under way", name, word * 4,
           shadow.writer);
    if (shadow.write_interval == block.interval && shadow.writer != me)
      fail("%s reads shared byte %zu, which thread %d wrote with no barrier between", name, word * 4, shadow.writer);
    if (shadow.read_interval != block.interval) {
      shadow.read_interval = block.interval;
      shadow.reader = me;
    } else if (shadow.reader != me) {
      shadow.reader = SEVERAL;
    }
  }
}

// A write that begins now: a plain one is also done now, one of cp.async is done by `copy_landed`.
inline void write_shared(size_t offset, size_t bytes, bool asynchronous) {
  Block& block = *current;
  int16_t me = static_cast<int16_t>(block.running->id);
  const char* name = block.running->operation.name;
  for (size_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
    Shadow& shadow = block.shadow[word];
    if (shadow.matrix_reads)
      fail("%s overwrites shared byte %zu, which an unfinished wgmma still reads", name, word * 4);
    if (shadow.copies)
      fail("%s overwrites shared byte %zu while a cp.async of thread %d into it is under way", name, word * 4,
           shadow.writer);
    if (shadow.read_interval == block.interval && shadow.reader != me)
      fail("%s overwrites shared byte %zu, which another thread reads with no barrier between", name, word * 4);
    if (shadow.write_interval == block.interval && shadow.writer != me)
      fail("%s overwrites shared byte %zu, which thread %d wrote with no barrier between", name, word * 4,
           shadow.writer);
    shadow.writer = me;
    if (asynchronous) {
      shadow.copies = 1;
    } else {
      shadow.write_interval = block.interval;
      shadow.write_number = block.write_number;
    }
  }
}

inline void copy_landed(size_t offset) {
  Block& block = *current;
  for (size_t word = offset / 4; word < offset / 4 + 4; ++word) {
    Shadow& shadow = block.shadow[word];
    shadow.copies = 0;
    shadow.write_interval = block.interval;
    shadow.write_number = block.write_number;
  }
}

// A wgmma of the running warpgroup begins to read. What it reads was written in an earlier interval and fenced by its
// writer.
inline void matrix_read_begins(size_t offset, size_t bytes) {
  Block& block = *current;
  for (size_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
    Shadow& shadow = block.shadow[word];
    if (shadow.copies)
      fail("wgmma reads shared byte %zu while a cp.async of thread %d into it is under way", word * 4, shadow.writer);
    if (shadow.write_interval == block.interval)
      fail("wgmma reads shared byte %zu, which thread %d wrote with no barrier between", word * 4, shadow.writer);
    if (shadow.write_interval >= 0) {
      const CudaThread& writer = block.threads[static_cast<size_t>(shadow.writer)];
      int64_t fence = writer.fence_interval < block.interval ? writer.fence : writer.earlier_fence;
      if (fence <= shadow.write_number)
        fail("wgmma reads shared byte %zu, which thread %d wrote with no fence.proxy.async before the barrier",
             word * 4, shadow.writer);
    }
    ++shadow.matrix_reads;
  }
}

inline void matrix_read_ends(size_t offset, size_t bytes) {
  Block& block = *current;
  for (size_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
    Shadow& shadow = block.shadow[word];
    --shadow.matrix_reads;
    shadow.read_interval = block.interval;
    shadow.reader = SEVERAL;
  }
}

}  // namespace smelt::emulator
