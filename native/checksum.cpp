// checksum: CRC-32C of many pieces on the shared threads, and what combining two of them takes.
//
// A piece is cut into chunks, so that one large piece keeps every thread busy; the chunks' checksums are combined in
// their order. Which loop runs follows the processor alone, not tm_isa_choose: they all give the same.

#include "checksum.h"

#include <algorithm>
#include <errno.h>
#include <new>
#include <vector>

#include "tiermem.h"
#include "workers.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

const uint64_t CHUNK = 1 << 20;       // of a piece: one task
const uint64_t SMALL_CHUNK = 1 << 18; // when there is so little that threads would stand idle
const uint64_t LITTLE = 8 * CHUNK;

struct PlainTable {
    uint32_t of[8][256];
    constexpr PlainTable() : of() {
        for (uint32_t value = 0; value < 256; ++value)
            for (uint64_t byte = 0; byte < 8; ++byte)
                of[byte][value] = tm_crc_multiply(value, tm_crc_power(8 * (byte + 1)));
    }
};

struct Sums {
    tm_crc_loop loop;
    const void *const *pieces;
    const uint64_t *bytes;
    uint64_t chunk_bytes;
    std::vector<uint64_t> first; // chunk of each piece, and the number of all
    std::vector<uint32_t> chunks;
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

static tm_crc_loop best_loop() {
    tm_crc_loop loops[3];
    const char *names[3];
    return loops[tm_crc_loops(loops, names) - 1];
}

static void sum_chunk(void *context, uint64_t index) {
    Sums *sums = (Sums *)context;
    const auto behind = std::upper_bound(sums->first.begin(), sums->first.end(), index);
    const uint64_t piece = (uint64_t)(behind - sums->first.begin()) - 1;
    const uint64_t begin = (index - sums->first[piece]) * sums->chunk_bytes;
    const uint64_t bytes = std::min(sums->chunk_bytes, sums->bytes[piece] - begin);
    sums->chunks[index] = ~sums->loop(~0u, (const uint8_t *)sums->pieces[piece] + begin, bytes);
}

// power: of x, by what a whole chunk shifts.
static uint32_t combined(const Sums *sums, uint64_t piece, uint32_t power) {
    const uint64_t first = sums->first[piece], last = sums->first[piece + 1];
    if (first == last)
        return 0;
    uint32_t crc = sums->chunks[first];
    for (uint64_t chunk = first + 1; chunk + 1 < last; ++chunk)
        crc = tm_crc_multiply(crc, power) ^ sums->chunks[chunk];
    if (last - first == 1)
        return crc;
    return tm_crc32c_combine(crc, sums->chunks[last - 1], sums->bytes[piece] - (last - 1 - first) * sums->chunk_bytes);
}

static uint64_t chunk_bytes_of(uint64_t n, const uint64_t *bytes) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < n && total < LITTLE; ++i)
        total += std::min(bytes[i], LITTLE);
    return total < LITTLE ? SMALL_CHUNK : CHUNK;
}

int tm_crc32c(tm_workers *workers, uint64_t n, const void *const *pieces, const uint64_t *bytes, uint32_t *crcs) {
    static const tm_crc_loop loop = best_loop();
    if (n && (!pieces || !bytes || !crcs))
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        if (bytes[i] && !pieces[i])
            return -EINVAL;
    try {
        Sums sums{loop, pieces, bytes, chunk_bytes_of(n, bytes), std::vector<uint64_t>(n + 1), {}};
        for (uint64_t i = 0; i < n; ++i)
            sums.first[i + 1] = sums.first[i] + (bytes[i] + sums.chunk_bytes - 1) / sums.chunk_bytes;
        sums.chunks.resize(sums.first[n]);
        tm_workers_run(workers, sums.first[n], sum_chunk, &sums);
        const uint32_t power = tm_crc_power(8 * sums.chunk_bytes);
        for (uint64_t i = 0; i < n; ++i)
            crcs[i] = combined(&sums, i, power);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
    return 0;
}

uint32_t tm_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
    return tm_crc_multiply(a, tm_crc_power(8 * b_bytes)) ^ b;
}

// Messages of one length follow one another often: what a length shifts is kept for the next.
int tm_crc32c_join(uint64_t n, const uint64_t *first, const uint32_t *crcs, const uint64_t *bytes, uint32_t *joined) {
    if (n && (!first || !joined || (first[n] > first[0] && (!crcs || !bytes))))
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        if (first[i] > first[i + 1])
            return -EINVAL;
    uint64_t length = 0;
    uint32_t power = tm_crc_power(0);
    for (uint64_t i = 0; i < n; ++i) {
        uint32_t crc = first[i] < first[i + 1] ? crcs[first[i]] : 0;
        for (uint64_t each = first[i] + 1; each < first[i + 1]; ++each) {
            if (bytes[each] != length)
                length = bytes[each], power = tm_crc_power(8 * length);
            crc = tm_crc_multiply(crc, power) ^ crcs[each];
        }
        joined[i] = crc;
    }
    return 0;
}
