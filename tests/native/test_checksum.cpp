// Is every loop the CRC-32C that the world knows, and does it combine, however a message is cut and shared?

#include <errno.h>
#include <string.h>
#include <string>
#include <vector>

#include "check.h"
#include "checksum.h"
#include "tiermem.h"

static uint32_t crc_of(tm_crc_loop loop, const void *data, uint64_t bytes) {
    return ~loop(~0u, (const uint8_t *)data, bytes);
}

static uint32_t crc_of(const std::vector<uint8_t> &data) {
    const void *piece = data.data();
    const uint64_t bytes = data.size();
    uint32_t crc = 1;
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &bytes, &crc), 0);
    return crc;
}

// Bit by bit, as the polynomial's definition has it.
static uint32_t reference(const uint8_t *data, uint64_t bytes) {
    uint32_t crc = ~0u;
    for (uint64_t i = 0; i < bytes; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit)
            crc = (crc >> 1) ^ ((crc & 1) ? TM_CRC_POLYNOMIAL : 0);
    }
    return ~crc;
}

static std::vector<uint8_t> random_bytes(uint64_t bytes, uint64_t seed) {
    Numbers numbers{seed};
    std::vector<uint8_t> data(bytes);
    for (uint8_t &byte : data)
        byte = (uint8_t)numbers.next();
    return data;
}

// RFC 3720, B.4, its checksums as numbers; the check value of the catalogues of CRCs; and no bytes at all.
static void published_vectors_hold(tm_crc_loop loop) {
    std::vector<uint8_t> data(32, 0);
    CHECK_EQUAL(crc_of(loop, data.data(), 32), 0x8A9136AAu);
    data.assign(32, 0xFF);
    CHECK_EQUAL(crc_of(loop, data.data(), 32), 0x62A8AB43u);
    for (int i = 0; i < 32; ++i)
        data[i] = (uint8_t)i;
    CHECK_EQUAL(crc_of(loop, data.data(), 32), 0x46DD794Eu);
    for (int i = 0; i < 32; ++i)
        data[i] = (uint8_t)(31 - i);
    CHECK_EQUAL(crc_of(loop, data.data(), 32), 0x113FDB5Cu);
    const uint8_t read_command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                                      0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                      0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
    CHECK_EQUAL(crc_of(loop, read_command, 48), 0xD9963A56u);
    CHECK_EQUAL(crc_of(loop, "123456789", 9), 0xE3069283u);
    CHECK_EQUAL(crc_of(loop, "", 0), 0);
}

// Lengths on both sides of a word, of three lanes, of what AVX-512 holds; addresses of every alignment.
static void every_length_and_alignment_equals_the_definition(tm_crc_loop loop) {
    const std::vector<uint8_t> data = random_bytes(3 * 3 * 2048 + 700, 31);
    std::vector<uint64_t> lengths;
    for (uint64_t length = 0; length < 80; ++length)
        lengths.push_back(length);
    for (uint64_t near : {256, 512, 768, 2048, 4096, 3 * 2048, 2 * 3 * 2048, 3 * 3 * 2048})
        for (uint64_t length = near - 9; length <= near + 9; ++length)
            lengths.push_back(length);
    for (uint64_t length : lengths)
        for (uint64_t offset : {0, 1, 3, 8, 63})
            CHECK_EQUAL(crc_of(loop, data.data() + offset, length), reference(data.data() + offset, length));
}

static void a_message_may_come_in_parts(tm_crc_loop loop) {
    const std::vector<uint8_t> data = random_bytes(20000, 32);
    for (uint64_t cut : {0, 1, 7, 511, 513, 6144, 19999, 20000}) {
        const uint32_t first = loop(~0u, data.data(), cut);
        CHECK_EQUAL(~loop(first, data.data() + cut, data.size() - cut), reference(data.data(), data.size()));
    }
}

static void any_flipped_bit_is_seen(tm_crc_loop loop) {
    std::vector<uint8_t> data = random_bytes(1031, 33);
    const uint32_t whole = crc_of(loop, data.data(), data.size());
    for (uint64_t bit = 0; bit < 8 * data.size(); ++bit) {
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(crc_of(loop, data.data(), data.size()) != whole);
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void two_combine_to_that_of_both() {
    for (uint64_t bytes : {0, 1, 1000, 70000}) {
        const std::vector<uint8_t> data = random_bytes(bytes, 34);
        for (uint64_t cut : {bytes * 0, bytes / 3, bytes / 2, bytes}) {
            const std::vector<uint8_t> a(data.begin(), data.begin() + (long)cut),
                b(data.begin() + (long)cut, data.end());
            CHECK_EQUAL(tm_crc32c_combine(crc_of(a), crc_of(b), b.size()), crc_of(data));
        }
    }
}

static void many_join_in_their_groups() {
    const std::vector<uint8_t> data = random_bytes(5000, 37);
    const uint64_t bytes[] = {100, 0, 900, 900, 1, 900, 2199}, first[] = {0, 0, 3, 4, 7};
    uint32_t crcs[7], joined[] = {7, 7, 7, 7, 7};
    uint64_t starts[8] = {0};
    for (int i = 0; i < 7; ++i) {
        starts[i + 1] = starts[i] + bytes[i];
        crcs[i] = ~tm_crc_plain(~0u, data.data() + starts[i], bytes[i]);
    }
    CHECK_EQUAL(tm_crc32c_join(4, first, crcs, bytes, joined), 0);
    CHECK_EQUAL(joined[0], 0);
    for (int i = 1; i < 4; ++i) {
        const uint64_t start = starts[first[i]];
        CHECK_EQUAL(joined[i], ~tm_crc_plain(~0u, data.data() + start, starts[first[i + 1]] - start));
    }
    CHECK_EQUAL(joined[4], 7);
    const uint64_t descends[] = {3, 1};
    CHECK_EQUAL(tm_crc32c_join(1, descends, crcs, bytes, joined), -EINVAL);
    CHECK_EQUAL(tm_crc32c_join(1, first + 1, nullptr, bytes, joined), -EINVAL);
    CHECK_EQUAL(tm_crc32c_join(1, first, nullptr, nullptr, joined), 0); // of nothing
}

// Zeros behind a message, by doubling; further than memory goes.
static void combining_is_right_for_any_length() {
    const uint32_t a = crc_of(random_bytes(100, 35));
    uint32_t seen = a, zeros = crc_of(std::vector<uint8_t>(1, 0));
    for (uint64_t bytes = 1; bytes < 1ull << 60; bytes *= 2) {
        seen = tm_crc32c_combine(a, zeros, bytes);
        CHECK_EQUAL(tm_crc32c_combine(seen, zeros, bytes),
                    tm_crc32c_combine(a, tm_crc32c_combine(zeros, zeros, bytes), 2 * bytes));
        zeros = tm_crc32c_combine(zeros, zeros, bytes);
    }
}

static void pieces_are_shared_and_cut_without_a_difference(uint32_t num_threads, uint64_t chunk) {
    const std::vector<uint8_t> data = random_bytes(chunk == 1 << 20 ? 9 << 20 : 3 << 20, 36);
    const uint64_t starts[] = {0, 5, 5, 1000, chunk - 1, 300000, chunk};
    const uint64_t bytes[] = {chunk == 1 << 20 ? data.size() : 12345, 0, 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk};
    std::vector<const void *> pieces;
    for (uint64_t start : starts)
        pieces.push_back(data.data() + start);
    pieces[1] = nullptr; // of no bytes
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
    std::vector<uint32_t> crcs(8, 77);
    for (int time = 0; time < 3; ++time)
        CHECK_EQUAL(tm_crc32c(workers, 7, pieces.data(), bytes, crcs.data()), 0);
    CHECK_EQUAL(tm_workers_close(workers), 0);
    for (int i = 0; i < 7; ++i)
        CHECK_EQUAL(crcs[i], ~tm_crc_plain(~0u, data.data() + starts[i], bytes[i]));
    CHECK_EQUAL(crcs[7], 77);
}

static void bad_arguments_are_refused() {
    const uint64_t bytes = 4;
    const void *piece = nullptr;
    uint32_t crc;
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &bytes, &crc), -EINVAL);
    CHECK_EQUAL(tm_crc32c(nullptr, 1, nullptr, &bytes, &crc), -EINVAL);
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, nullptr, &crc), -EINVAL);
    piece = &bytes;
    CHECK_EQUAL(tm_crc32c(nullptr, 1, &piece, &bytes, nullptr), -EINVAL);
    CHECK_EQUAL(tm_crc32c(nullptr, 0, nullptr, nullptr, nullptr), 0);
}

int main() {
    tm_crc_loop loops[3];
    const char *names[3];
    const int num_loops = tm_crc_loops(loops, names);
    for (int i = 0; i < num_loops; ++i) {
        printf("%s\n", names[i]);
        RUN(published_vectors_hold, loops[i]);
        RUN(every_length_and_alignment_equals_the_definition, loops[i]);
        RUN(a_message_may_come_in_parts, loops[i]);
        RUN(any_flipped_bit_is_seen, loops[i]);
    }
    RUN(two_combine_to_that_of_both);
    RUN(many_join_in_their_groups);
    RUN(combining_is_right_for_any_length);
    for (uint32_t num_threads : {1u, 2u, 5u})
        for (uint64_t chunk : {1 << 18, 1 << 20})
            RUN(pieces_are_shared_and_cut_without_a_difference, num_threads, chunk);
    RUN(bad_arguments_are_refused);
}
