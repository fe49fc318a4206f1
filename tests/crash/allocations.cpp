// allocations: lets the nth allocation of one loaded module fail, by putting our own functions into its table of
// addresses.
//
// Only that module's calls are counted: the interpreter's, torch's and the C library's own go by.

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <link.h>
#include <new>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace {

enum Kind { NEW, NEW_NOTHROW, CALLOC, MAP, THREAD, NUM_KINDS };

std::atomic<uint64_t> counts[NUM_KINDS];
int failing_kind = -1;
uint64_t failing_from = 0, failing_to = 0;

bool fails(Kind kind) {
    const uint64_t number = ++counts[kind];
    return kind == failing_kind && number >= failing_from && number <= failing_to;
}

void *throwing_new(size_t bytes) {
    if (fails(NEW))
        throw std::bad_alloc();
    return ::operator new(bytes);
}

void *silent_new(size_t bytes, const std::nothrow_t &nothrow) {
    return fails(NEW_NOTHROW) ? nullptr : ::operator new(bytes, nothrow);
}

void *our_calloc(size_t number, size_t bytes) {
    if (!fails(CALLOC))
        return calloc(number, bytes);
    errno = ENOMEM;
    return nullptr;
}

void *our_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (!fails(MAP))
        return mmap(at, bytes, protection, flags, fd, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

using Start = void (*)(std::thread *, void *, void (*)());
Start start_thread; // std::thread::_M_start_thread; the state comes by reference, for it has a destructor

void our_start(std::thread *thread, void *state, void (*depend)()) {
    if (fails(THREAD))
        throw std::system_error(EAGAIN, std::generic_category());
    start_thread(thread, state, depend);
}

struct Patch {
    const char *symbol;
    void *function;
};

const Patch PATCHES[] = {
    {"_Znwm", (void *)throwing_new},
    {"_Znam", (void *)throwing_new},
    {"_ZnwmRKSt9nothrow_t", (void *)silent_new},
    {"_ZnamRKSt9nothrow_t", (void *)silent_new},
    {"calloc", (void *)our_calloc},
    {"mmap", (void *)our_mmap},
    {"_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE", (void *)our_start},
};

struct Search {
    const char *module;
    int num_patched;
};

void patch(const char *symbol, void **address, Search *search) {
    for (const Patch &each : PATCHES) {
        if (strcmp(symbol, each.symbol) != 0)
            continue;
        const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        mprotect((void *)((uintptr_t)address & ~(page - 1)), page, PROT_READ | PROT_WRITE);
        if (each.function == (void *)our_start)
            start_thread = (Start)*address;
        *address = each.function;
        ++search->num_patched;
    }
}

int look(dl_phdr_info *info, size_t, void *context) {
    Search *search = (Search *)context;
    if (!strstr(info->dlpi_name, search->module))
        return 0;
    const ElfW(Sym) *symbols = nullptr;
    const char *names = nullptr;
    const ElfW(Rela) * tables[2] = {};
    size_t bytes[2] = {};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        for (auto *entry = (ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); entry->d_tag; ++entry) {
            const ElfW(Addr) value = entry->d_un.d_ptr; // the C library has made addresses of what are addresses
            if (entry->d_tag == DT_SYMTAB)
                symbols = (const ElfW(Sym) *)value;
            else if (entry->d_tag == DT_STRTAB)
                names = (const char *)value;
            else if (entry->d_tag == DT_JMPREL)
                tables[0] = (const ElfW(Rela) *)value;
            else if (entry->d_tag == DT_PLTRELSZ)
                bytes[0] = value;
            else if (entry->d_tag == DT_RELA)
                tables[1] = (const ElfW(Rela) *)value;
            else if (entry->d_tag == DT_RELASZ)
                bytes[1] = value;
        }
    }
    for (int table = 0; table < 2; ++table)
        for (size_t i = 0; i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
            const ElfW(Rela) &row = tables[table][i];
            const ElfW(Sym) &symbol = symbols[ELF64_R_SYM(row.r_info)];
            if (ELF64_R_SYM(row.r_info) != 0 && row.r_addend == 0)
                patch(names + symbol.st_name, (void **)(info->dlpi_addr + row.r_offset), search);
        }
    return 1;
}

} // namespace

// Patches the loaded module whose file's name holds `module`; how many addresses were replaced. Once a process.
extern "C" int allocations_patch(const char *module) {
    Search search = {module, 0};
    dl_iterate_phdr(look, &search);
    return search.num_patched;
}

// From now on the nth allocation of a kind fails (from 1), or each from that one on.
extern "C" void allocations_fail(int kind, uint64_t nth, int is_for_good) {
    failing_kind = kind;
    failing_from = nth;
    failing_to = is_for_good ? UINT64_MAX : nth;
}

// Allocations of a kind so far.
extern "C" uint64_t allocations_count(int kind) { return counts[kind]; }
