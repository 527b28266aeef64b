// What does CuTe say of the same fragments, tiles and descriptors? Host code only; each line is a name and its
// integers.
//
//   mma a|b|c            row and column of each value of each lane, of mma.m16n8k16 (b as k, n)
//   wgmma COLUMNS        row and column of each accumulator of each thread
//   tile MAJOR ROWS FIRST      where element (mn, k) of a swizzled tile [ROWS, 64] stands, in bytes, k counting fastest
//   descriptor MAJOR ROWS FIRST STEP      start (bytes from the tile), LBO, SBO (16 bytes), swizzle of 16 k of that
//   tile
//
// FIRST is the direction in which the atoms of a tile follow each other: mn or k.
#include <cute/tensor.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include <cstdio>

using namespace cute;
using bf16 = bfloat16_t;

template <class Layout>
void places(const char* name, Layout layout, int lanes, int values, int rows, bool turned) {
  std::printf("%s", name);
  for (int lane = 0; lane < lanes; ++lane)
    for (int value = 0; value < values; ++value) {
      const int at = layout(lane, value), row = at % rows, column = at / rows;
      std::printf(" %d %d", turned ? column : row, turned ? row : column);
    }
  std::printf("\n");
}

template <int COLUMNS, class Op>
void accumulators() {
  char name[32];
  std::snprintf(name, sizeof name, "wgmma %d", COLUMNS);
  places(name, typename MMA_Traits<Op>::CLayout{}, 128, COLUMNS / 2, 64, false);
}

template <GMMA::Major MAJOR, int ROWS, class Order>
void tile(const char* name, Order order) {
  using Atom = GMMA::Layout_SW128_Atom<bf16, MAJOR>;
  const auto layout = tile_to_shape(Atom{}, Shape<Int<ROWS>, _64>{}, order);
  const auto bytes = as_position_independent_swizzle_layout(layout);
  std::printf("tile %s", name);
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < 64; ++k) std::printf(" %d", static_cast<int>(bytes(row, k) * sizeof(bf16)));
  std::printf("\n");
  alignas(1024) static bf16 memory[ROWS * 64];
  const auto tensor = make_tensor(make_smem_ptr(memory), layout);
  for (int step = 0; step < 4; ++step) {
    const auto part = local_tile(tensor, Shape<Int<ROWS>, _16>{}, make_coord(0, step));
    const auto fields = GMMA::make_gmma_desc<MAJOR>(part).bitfield;
    const auto start = reinterpret_cast<char*>(raw_pointer_cast(part.data())) - reinterpret_cast<char*>(memory);
    std::printf("descriptor %s %d %d %d %d %d\n", name, step, static_cast<int>(start), fields.leading_byte_offset_,
                fields.stride_byte_offset_, fields.layout_type_);
  }
}

template <int ROWS>
void k_major(const char* name) {
  tile<GMMA::Major::K, ROWS>(name, Step<_1, _2>{});
}

int main() {
  using Mma = MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>;
  places("mma a", typename Mma::ALayout{}, 32, 8, 16, false);
  places("mma b", typename Mma::BLayout{}, 32, 4, 8, true);
  places("mma c", typename Mma::CLayout{}, 32, 4, 16, false);
  constexpr auto K = GMMA::Major::K, MN = GMMA::Major::MN;
  accumulators<64, SM90_64x64x16_F32BF16BF16_SS<K, K>>();
  accumulators<96, SM90_64x96x16_F32BF16BF16_SS<K, K>>();
  accumulators<128, SM90_64x128x16_F32BF16BF16_SS<K, K>>();
  accumulators<176, SM90_64x176x16_F32BF16BF16_SS<K, K>>();
  accumulators<192, SM90_64x192x16_F32BF16BF16_SS<K, K>>();
  accumulators<256, SM90_64x256x16_F32BF16BF16_SS<K, K>>();
  k_major<64>("K 64 mn");
  k_major<96>("K 96 mn");
  k_major<128>("K 128 mn");
  k_major<176>("K 176 mn");
  k_major<192>("K 192 mn");
  k_major<256>("K 256 mn");
  // of 64 columns each: CuTe has no MN-major tile of 96 or 176 in this swizzle
  tile<MN, 64>("MN 64 mn", Step<_1, _2>{});
  tile<MN, 128>("MN 128 mn", Step<_1, _2>{});
  tile<MN, 192>("MN 192 mn", Step<_1, _2>{});
  tile<MN, 256>("MN 256 mn", Step<_1, _2>{});
  tile<MN, 64>("MN 64 k", Step<_2, _1>{});
  tile<MN, 128>("MN 128 k", Step<_2, _1>{});
  tile<MN, 192>("MN 192 k", Step<_2, _1>{});
  tile<MN, 256>("MN 256 k", Step<_2, _1>{});
}
