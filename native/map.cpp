// map: address space for one arena. Reserves, makes resident, gives back, unmaps; carves nothing.

#include <algorithm>
#include <atomic>
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "workers.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14; older headers lack the name
#endif

static const uint64_t HUGE_PAGE = 2ull << 20;
static const uint64_t COMMITTED_AT_ONCE = 32ull << 20; // by a thread; it starts in a hundredth of the time

static uint64_t round_up(uint64_t bytes) { return (bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1); }

int tm_map_open(uint64_t bytes, void **base) {
    if (!base || bytes == 0 || bytes > (1ull << 46))
        return -EINVAL;
    const uint64_t size = round_up(bytes);
    // One huge page more than asked, so that an aligned range lies inside; the rest is cut off.
    void *memory =
        mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return -errno;
    const uint64_t start = (uint64_t)memory;
    const uint64_t aligned = round_up(start);
    if (aligned > start)
        munmap(memory, aligned - start);
    if (start + HUGE_PAGE > aligned)
        munmap((void *)(aligned + size), start + HUGE_PAGE - aligned);
    // A kernel without huge pages answers EINVAL: slower, not wrong.
    madvise((void *)aligned, size, MADV_HUGEPAGE);
    if (madvise((void *)aligned, size, MADV_DONTFORK) != 0) {
        const int error = errno;
        munmap((void *)aligned, size);
        return -error;
    }
    *base = (void *)aligned;
    return 0;
}

// Writes `bytes` of NaN, a multiple of 4096, into an empty file.
static int write_nan(int fd, uint64_t bytes) {
    uint16_t words[2048];
    for (uint16_t &word : words)
        word = 0x7fff;
    while (bytes > 0) {
        const ssize_t written = write(fd, words, sizeof(words));
        if (written < 0 && errno != EINTR)
            return errno;
        bytes -= written < 0 ? 0 : (uint64_t)written;
    }
    return 0;
}

int tm_map_nan(uint64_t bytes, void **base) {
    const uint64_t most_maps = 4096; // of 65,530 that Linux allows a process
    const int answer = tm_map_open(bytes, base);
    if (answer != 0)
        return answer;
    const uint64_t size = round_up(bytes);
    uint64_t block = 256 << 10;
    while (size > most_maps * block)
        block *= 2;
    const int fd = memfd_create("tiermem-nan", MFD_CLOEXEC);
    int error = fd < 0 ? errno : write_nan(fd, block);
    for (uint64_t done = 0; done < size && error == 0; done += block) {
        const uint64_t length = size - done < block ? size - done : block;
        const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap((char *)*base + done, length, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED)
            error = errno;
    }
    if (fd >= 0)
        close(fd);
    if (error != 0) {
        munmap(*base, size);
        *base = nullptr;
    }
    return -error;
}

static bool is_page_range(const void *address, uint64_t bytes) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return address && (uint64_t)address % page == 0 && bytes % page == 0;
}

int tm_map_bind(void *address, uint64_t bytes, int32_t node) {
    const int prefer = 1; // MPOL_PREFERRED, without libnuma's header
    const int32_t word_bits = 8 * sizeof(unsigned long);
    unsigned long nodes[16] = {};
    if (!is_page_range(address, bytes) || node < 0 || node >= 16 * word_bits)
        return -EINVAL;
    nodes[node / word_bits] = 1ul << (node % word_bits);
    // The kernel takes one bit less than it is told.
    return syscall(SYS_mbind, address, bytes, prefer, nodes, 16ul * word_bits + 1, 0) == 0 ? 0 : -errno;
}

// Kernels before 5.14: writes into every page without changing it, also while others write there.
static void touch_pages(void *address, uint64_t bytes) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t done = 0; done < bytes; done += page)
        __atomic_fetch_or((char *)address + done, 0, __ATOMIC_RELAXED);
}

static int populate(void *address, uint64_t bytes) {
    int answer;
    do
        answer = madvise(address, bytes, MADV_POPULATE_WRITE);
    while (answer != 0 && (errno == EINTR || errno == EAGAIN));
    if (answer == 0)
        return 0;
    if (errno != EINVAL)
        return -errno;
    touch_pages(address, bytes);
    return 0;
}

namespace {

struct Commit {
    char *address;
    uint64_t bytes;
    std::atomic<int> error;
};

} // namespace

static void commit_piece(void *context, uint64_t index) {
    Commit *commit = (Commit *)context;
    const uint64_t first = index * COMMITTED_AT_ONCE;
    const int error = populate(commit->address + first, std::min(COMMITTED_AT_ONCE, commit->bytes - first));
    if (error != 0)
        commit->error = error;
}

int tm_map_commit(void *address, uint64_t bytes) {
    if (!is_page_range(address, bytes))
        return -EINVAL;
    const uint64_t num_pieces = (bytes + COMMITTED_AT_ONCE - 1) / COMMITTED_AT_ONCE;
    cpu_set_t cores;
    tm_workers *workers = nullptr; // without them this thread does it all
    if (num_pieces > 1 && sched_getaffinity(0, sizeof cores, &cores) == 0)
        tm_workers_open((uint32_t)std::min<uint64_t>(num_pieces, CPU_COUNT(&cores)), &workers);
    Commit commit = {(char *)address, bytes, {0}};
    tm_workers_run(workers, num_pieces, commit_piece, &commit);
    if (workers)
        tm_workers_close(workers);
    return commit.error;
}

int tm_map_release(void *address, uint64_t bytes) {
    if (!is_page_range(address, bytes))
        return -EINVAL;
    return bytes == 0 || madvise(address, bytes, MADV_DONTNEED) == 0 ? 0 : -errno;
}

int tm_map_close(void *base, uint64_t bytes) {
    if (!base || (uint64_t)base % HUGE_PAGE != 0 || bytes == 0)
        return -EINVAL;
    return munmap(base, round_up(bytes)) == 0 ? 0 : -errno;
}
