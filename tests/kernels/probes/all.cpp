// Does any probe, right or wrong, leave memory behind? Runs all of them under a few seeds; the sanitizers of the build
// speak up. Prints how many launches ended with a finding, and by how many mappings the process grew after the first
// round.
#include <stddef.h>
#include <stdint.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

extern "C" {
void smelt_emulator_seed(uint64_t seed);
int probe_copies(const uint32_t* in, uint32_t* out, int steps, int bug);
int probe_words(uint32_t* out, int bug);
int probe_stores(uint32_t* out, int blocks, int bug);
int probe_warps(uint32_t* out, int bug);
int probe_matrices(const uint32_t* in, uint32_t* out, int steps, int bug);
}

static int mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

int main() {
  std::vector<uint32_t> in(8 * 128 * 32), out(128 * 48);
  int findings = 0, before = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    smelt_emulator_seed(seed);
    for (int bug = 0; bug < 18; ++bug) {
      findings += probe_copies(in.data(), out.data(), 4, bug) != 0;
      findings += probe_words(out.data(), bug) != 0;
      findings += probe_stores(out.data(), 8, bug) != 0;
      findings += probe_warps(out.data(), bug) != 0;
      findings += probe_matrices(in.data(), out.data(), 8, bug) != 0;
    }
    if (seed == 1) before = mappings();
  }
  std::printf("%d findings, %d mappings more\n", findings, mappings() - before);
}
