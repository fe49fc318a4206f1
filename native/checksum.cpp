// checksum: the loops that a processor has, and what joining CRC-32Cs takes. pass.cpp sums pieces.

#include "checksum.h"

#include <errno.h>

#include "tiermem.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

struct PlainTable {
    uint32_t of[8][256];
    constexpr PlainTable() : of() {
        for (uint32_t value = 0; value < 256; ++value)
            for (uint64_t byte = 0; byte < 8; ++byte)
                of[byte][value] = tm_crc_multiply(value, tm_crc_power(8 * (byte + 1)));
    }
};

} // namespace

// Eight bytes at a time through eight tables: what a byte that lies so many bytes before the end does to the remainder.
uint32_t tm_crc_plain(uint32_t crc, const uint8_t *data, uint64_t bytes) {
    static constexpr PlainTable table;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint32_t next = 0;
        for (int i = 0; i < 8; ++i)
            next ^= table.of[7 - i][(data[i] ^ (i < 4 ? crc >> (8 * i) : 0)) & 255];
        crc = next;
    }
    for (; bytes; --bytes, ++data)
        crc = table.of[0][(crc ^ *data) & 255] ^ (crc >> 8);
    return crc;
}

int tm_crc_loops(tm_crc_loop *loops, const char **names) {
    int n = 0;
    loops[n] = tm_crc_plain, names[n++] = "plain C";
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2"))
        loops[n] = tm_crc_sse42, names[n++] = "SSE4.2";
    if (n == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
        loops[n] = tm_crc_avx512, names[n++] = "AVX-512";
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & (1u << 7)) // HWCAP_CRC32
        loops[n] = tm_crc_arm, names[n++] = "ARMv8 CRC";
#endif
    return n;
}

uint32_t tm_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
    return tm_crc_multiply(a, tm_crc_power(8 * b_bytes)) ^ b;
}

namespace {

// What the last few lengths shift: messages of one length follow one another often, and so do the ends of pieces.
struct Powers {
    uint64_t lengths[4] = {};
    uint32_t powers[4] = {tm_crc_power(0), tm_crc_power(0), tm_crc_power(0), tm_crc_power(0)};
    unsigned turn = 0;

    uint32_t of(uint64_t bytes) {
        for (unsigned i = 0; i < 4; ++i)
            if (lengths[i] == bytes)
                return powers[i];
        turn = (turn + 1) % 4;
        lengths[turn] = bytes;
        return powers[turn] = tm_crc_power(8 * bytes);
    }
};

} // namespace

int tm_crc32c_join(uint64_t n, const uint64_t *first, const uint32_t *crcs, const uint64_t *bytes, uint32_t *joined) {
    if (n && (!first || !joined || (first[n] > first[0] && (!crcs || !bytes))))
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        if (first[i] > first[i + 1])
            return -EINVAL;
    Powers powers;
    for (uint64_t i = 0; i < n; ++i) {
        uint32_t crc = first[i] < first[i + 1] ? crcs[first[i]] : 0;
        for (uint64_t each = first[i] + 1; each < first[i + 1]; ++each)
            crc = tm_crc_multiply(crc, powers.of(bytes[each])) ^ crcs[each];
        joined[i] = crc;
    }
    return 0;
}
