#include "recording.h"

#include <unistd.h>

#include <atomic>
#include <mutex>

namespace sim {
namespace {

std::atomic<bool> is_on{false};
std::mutex entries_lock;
auto &entries = *new std::vector<Entry>; // never destroyed: threads may outlive main

} // namespace

void record(bool on) {
    std::lock_guard lock(entries_lock);
    if (on)
        entries.clear();
    is_on = on;
}

bool is_recording() { return is_on; }

int64_t add_entry(Entry entry) {
    entry.thread = this_thread();
    entry.thread_id = gettid();
    std::lock_guard lock(entries_lock);
    entries.push_back(std::move(entry));
    return static_cast<int64_t>(entries.size()) - 1;
}

int64_t add_host_work(const std::string &name, const std::string &lane, uint64_t bytes, double flops,
                      const std::vector<int64_t> &needs, bool blocks) {
    return is_on ? add_entry({Entry::HOST_WORK, {name, Lane::NONE, bytes, flops}, lane, {}, {}, needs, blocks}) : -1;
}

std::vector<Entry> recorded() {
    std::lock_guard lock(entries_lock);
    return entries;
}

} // namespace sim
