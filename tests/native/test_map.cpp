// Does address space become memory when it is committed, and only then?

#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <vector>

#include "fixture.h"

static const uint64_t MIB = 1 << 20;

static uint64_t count_resident(char *start, uint64_t bytes) {
    std::vector<unsigned char> pages(bytes / 4096);
    CHECK(mincore(start, bytes, pages.data()) == 0);
    uint64_t count = 0;
    for (unsigned char page : pages)
        count += page & 1;
    return count * 4096;
}

static void memory_is_aligned_and_absent_until_committed() {
    Memory memory(16 * MIB);
    CHECK_EQUAL((uint64_t)memory.data % (2 * MIB), 0);
    CHECK_EQUAL(count_resident(memory.data, 16 * MIB), 0);
    CHECK_EQUAL(tm_map_commit(memory.data, 4 * MIB), 0);
    CHECK_EQUAL(count_resident(memory.data, 4 * MIB), 4 * MIB);
    CHECK_EQUAL(count_resident(memory.data + 4 * MIB, 12 * MIB), 0);
}

// The kernel says where a page lies, and which node it prefers.
static void pages_prefer_the_node_that_they_are_bound_to() {
    Memory memory(4 * MIB);
    const int bound = tm_map_bind(memory.data, 4 * MIB, 0);
    if (bound == -ENOSYS || bound == -EPERM)
        return; // a container may forbid it
    CHECK_EQUAL(bound, 0);
    CHECK_EQUAL(tm_map_commit(memory.data, 4 * MIB), 0);
    int mode = -1, node = -1;
    unsigned long nodes[16] = {};
    const unsigned long of_address = 2, of_page = 1; // MPOL_F_ADDR, MPOL_F_NODE
    CHECK_EQUAL(syscall(SYS_get_mempolicy, &mode, nodes, 1024ul, memory.data, of_address), 0);
    CHECK_EQUAL(mode, 1); // MPOL_PREFERRED
    CHECK_EQUAL(nodes[0], 1);
    CHECK_EQUAL(syscall(SYS_get_mempolicy, &node, nullptr, 0ul, memory.data, of_address | of_page), 0);
    CHECK_EQUAL(node, 0);
    CHECK_EQUAL(tm_map_bind(memory.data + 1, 4096, 0), -EINVAL);
    CHECK_EQUAL(tm_map_bind(memory.data, 4096, -1), -EINVAL);
    CHECK_EQUAL(tm_map_bind(memory.data, 4096, 1023), -EINVAL);
    CHECK_EQUAL(tm_map_bind(memory.data, 4096, 1024), -EINVAL);
}

// More than 32 MiB: threads share them.
static void much_is_committed_as_a_whole() {
    const uint64_t first = 4096, bytes = 99 * MIB + 8192;
    Memory memory(104 * MIB);
    memory.data[first + 33 * MIB] = 7;
    CHECK_EQUAL(tm_map_commit(memory.data + first, bytes), 0);
    CHECK_EQUAL(count_resident(memory.data + first, bytes), bytes);
    CHECK_EQUAL(count_resident(memory.data + 102 * MIB, 2 * MIB), 0);
    CHECK_EQUAL(memory.data[first + 33 * MIB], 7);
    CHECK_EQUAL(tm_map_commit(memory.data, 0), 0);
    CHECK_EQUAL(munmap(memory.data + 40 * MIB, 2 * MIB), 0);
    CHECK_EQUAL(tm_map_commit(memory.data, 104 * MIB), -ENOMEM);
}

static void commit_keeps_content_and_release_loses_it() {
    Memory memory(4 * MIB);
    memory.data[5000] = 7;
    CHECK_EQUAL(tm_map_commit(memory.data, 4 * MIB), 0);
    CHECK_EQUAL(memory.data[5000], 7);
    CHECK_EQUAL(memory.data[3 * MIB], 0);
    CHECK_EQUAL(tm_map_release(memory.data, 4 * MIB), 0);
    CHECK_EQUAL(count_resident(memory.data, 4 * MIB), 0);
    CHECK_EQUAL(memory.data[5000], 0);
}

static void bad_arguments_are_refused() {
    void *base;
    CHECK_EQUAL(tm_map_open(0, &base), -EINVAL);
    CHECK_EQUAL(tm_map_open(1ull << 60, &base), -EINVAL);
    CHECK_EQUAL(tm_map_open(MIB, nullptr), -EINVAL);
    Memory memory(2 * MIB);
    CHECK_EQUAL(tm_map_commit(memory.data + 1, 4096), -EINVAL);
    CHECK_EQUAL(tm_map_commit(memory.data, 100), -EINVAL);
    CHECK_EQUAL(tm_map_release(memory.data + 1, 4096), -EINVAL);
    CHECK_EQUAL(tm_map_close(memory.data + 4096, MIB), -EINVAL);
}

static void a_forked_child_does_not_inherit_it() {
    Memory memory(2 * MIB);
    memory.data[0] = 1;
    const pid_t child = fork();
    if (child == 0) {
        unsigned char page;
        _exit(mincore(memory.data, 4096, &page) == -1 && errno == ENOMEM ? 0 : 1);
    }
    int status;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
}

static void words_of_nan_take_no_memory_until_they_are_written() {
    const uint64_t bytes = 3 * MIB, mapped = 4 * MIB; // of whole huge pages
    void *base = nullptr;
    CHECK_EQUAL(tm_map_nan(bytes, &base), 0);
    CHECK_EQUAL((uint64_t)base % (2 * MIB), 0);
    uint16_t *words = (uint16_t *)base;
    for (uint64_t index = 0; index < mapped / 2; index++)
        CHECK_EQUAL(words[index], 0x7fff);
    words[77777] = 1; // this process's own page
    CHECK_EQUAL(words[77777], 1);
    uint64_t ones = 0;
    for (uint64_t index = 0; index < mapped / 2; index++)
        ones += words[index] != 0x7fff;
    CHECK_EQUAL(ones, 1);
    CHECK_EQUAL(tm_map_close(base, bytes), 0);
    CHECK_EQUAL(tm_map_nan(0, &base), -EINVAL);
    CHECK_EQUAL(tm_map_nan(MIB, nullptr), -EINVAL);
}

int main() {
    RUN(memory_is_aligned_and_absent_until_committed);
    RUN(pages_prefer_the_node_that_they_are_bound_to);
    RUN(much_is_committed_as_a_whole);
    RUN(commit_keeps_content_and_release_loses_it);
    RUN(bad_arguments_are_refused);
    RUN(a_forked_child_does_not_inherit_it);
    RUN(words_of_nan_take_no_memory_until_they_are_written);
}
