#include "recording.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>

namespace sim {
namespace {

std::atomic<bool> is_on{false};
std::mutex entries_lock;
int num_recordings = 0;                  // an operation may end after the recording that has its entry
auto &entries = *new std::vector<Entry>; // never destroyed: threads may outlive main

} // namespace

void record(bool on) {
    std::lock_guard lock(entries_lock);
    if (on) {
        entries.clear();
        num_recordings++;
    }
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

std::function<void()> timed(std::function<void()> run, int64_t number) {
    std::lock_guard lock(entries_lock);
    return [run = std::move(run), number, recording = num_recordings] {
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        std::lock_guard guard(entries_lock);
        if (recording == num_recordings)
            entries.at(number).ran_s = seconds.count();
    };
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
