// Where does the emulator read an operand of wgmma? Asked of its own functions, without a launch: a block with 227 KiB
// of shared memory stands there, and nothing runs.
#include "hopper.h"

using namespace smelt;

namespace {

struct StandingBlock {
  emulator::Block block;
  emulator::CudaThread thread;
  StandingBlock() {
    block.shared_bytes = 227 << 10;
    block.running = &thread;
    emulator::current = &block;
  }
  ~StandingBlock() { emulator::current = nullptr; }
};

}  // namespace

// The descriptor of a tile that begins at this offset in shared memory.
extern "C" uint64_t probe_descriptor(uint32_t offset, int mn_major, int leading_bytes, int stride_bytes) {
  const StandingBlock standing;
  const unsigned char* const start = standing.block.shared + offset;
  return descriptor(start, mn_major, leading_bytes, stride_bytes);
}

// Offsets of the chunks of 16 bytes of b [columns, 16 k]: of each column two, or of each k columns / 8.
extern "C" void probe_chunks(uint64_t descriptor, int columns, int mn_major, uint32_t* out) {
  const StandingBlock standing;
  emulator::Product product{};
  product.columns = columns;
  product.mn_major[1] = mn_major;
  emulator::find_chunks(product, 1, descriptor);
  for (uint32_t chunk : product.chunks[1]) *out++ = chunk;
}
