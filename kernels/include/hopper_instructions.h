// How is wgmma written? One instruction names every accumulator register, so each number of columns is an instruction
// of its own. The lists below are built of eights: SMELT_NAMES_48 is "%0, ..., %47", SMELT_D48 the same registers as
// operands. Included by hopper.h where nvcc compiles for sm_90a.
#pragma once

#include "device.h"

#define SMELT_D8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SMELT_NAMES_32                       \
  "%0, %1, %2, %3, %4, %5, %6, %7"           \
  ", %8, %9, %10, %11, %12, %13, %14, %15"   \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SMELT_NAMES_48                           \
  SMELT_NAMES_32                                 \
      ", %32, %33, %34, %35, %36, %37, %38, %39" \
      ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SMELT_NAMES_64                           \
  SMELT_NAMES_48                                 \
      ", %48, %49, %50, %51, %52, %53, %54, %55" \
      ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SMELT_NAMES_88                           \
  SMELT_NAMES_64                                 \
      ", %64, %65, %66, %67, %68, %69, %70, %71" \
      ", %72, %73, %74, %75, %76, %77, %78, %79" \
      ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SMELT_NAMES_96 SMELT_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SMELT_NAMES_128                                  \
  SMELT_NAMES_96                                         \
      ", %96, %97, %98, %99, %100, %101, %102, %103"     \
      ", %104, %105, %106, %107, %108, %109, %110, %111" \
      ", %112, %113, %114, %115, %116, %117, %118, %119" \
      ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SMELT_D32 SMELT_D8(0), SMELT_D8(8), SMELT_D8(16), SMELT_D8(24)
#define SMELT_D48 SMELT_D32, SMELT_D8(32), SMELT_D8(40)
#define SMELT_D64 SMELT_D48, SMELT_D8(48), SMELT_D8(56)
#define SMELT_D88 SMELT_D64, SMELT_D8(64), SMELT_D8(72), SMELT_D8(80)
#define SMELT_D96 SMELT_D88, SMELT_D8(88)
#define SMELT_D128 SMELT_D96, SMELT_D8(96), SMELT_D8(104), SMELT_D8(112), SMELT_D8(120)

#define SMELT_WGMMA(COLUMNS, REGISTERS, A, B, A_TRANSPOSED, B_TRANSPOSED)                            \
  template <bool A_MN, bool B_MN>                                                                    \
  struct Wgmma<COLUMNS, A_MN, B_MN> {                                                                \
    SMELT_DEVICE static void issue(float (&d)[REGISTERS], uint64_t a, uint64_t b) {                  \
      asm volatile(                                                                                  \
          "{\n.reg .pred accumulate;\nsetp.eq.u32 accumulate, 0, 0;\n"                               \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SMELT_NAMES_##REGISTERS \
          "}, %" #A ", %" #B ", accumulate, 1, 1, %" #A_TRANSPOSED ", %" #B_TRANSPOSED ";\n}\n"      \
          : SMELT_D##REGISTERS                                                                       \
          : "l"(a), "l"(b), "n"(int(A_MN)), "n"(int(B_MN)));                                         \
    }                                                                                                \
  }

namespace smelt {

template <int COLUMNS, bool A_MN, bool B_MN>
struct Wgmma;
SMELT_WGMMA(64, 32, 32, 33, 34, 35);
SMELT_WGMMA(96, 48, 48, 49, 50, 51);
SMELT_WGMMA(128, 64, 64, 65, 66, 67);
SMELT_WGMMA(176, 88, 88, 89, 90, 91);
SMELT_WGMMA(192, 96, 96, 97, 98, 99);
SMELT_WGMMA(256, 128, 128, 129, 130, 131);

// d[64 x COLUMNS] += a[64 x 16] b[16 x COLUMNS], by the 128 threads of a warpgroup. With w = warp of the warpgroup, g =
// lane / 4 and t = 2 (lane % 4): d[4 j + q] is row 16 w + g + 8 (q / 2), column 8 j + t + q % 2.
template <int COLUMNS, bool A_MN, bool B_MN>
SMELT_DEVICE void wgmma(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b) {
  Wgmma<COLUMNS, A_MN, B_MN>::issue(d, a, b);
}

SMELT_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
SMELT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
SMELT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N>
SMELT_DEVICE void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "the hardware counts to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

// Before wgmma_fence and after wgmma_wait: keeps the compiler from moving what reads or writes d into the time when d
// belongs to the hardware, which it cannot see.
template <int COUNT>
SMELT_DEVICE void hold(float (&d)[COUNT]) {
  SMELT_UNROLL
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace smelt

#undef SMELT_WGMMA
#undef SMELT_NAMES_32
#undef SMELT_NAMES_48
#undef SMELT_NAMES_64
#undef SMELT_NAMES_88
#undef SMELT_NAMES_96
#undef SMELT_NAMES_128
#undef SMELT_D8
#undef SMELT_D32
#undef SMELT_D48
#undef SMELT_D64
#undef SMELT_D88
#undef SMELT_D96
#undef SMELT_D128
