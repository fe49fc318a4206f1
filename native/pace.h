// pace: the bytes of strips that a step program has under way.
//
//     few    stay in a processor's cache, with which some disks exchange bytes faster than with memory
//     many   keep a disk busy that is the faster the more it has to do
//
// Which of them a machine wants shows only when it is tried. A program tries three limits in turns of equal bytes,
// keeps the fastest, and tries again later: each time after twice as many turns, because disks that others use drift.
#ifndef TIERMEM_PACE_H
#define TIERMEM_PACE_H

#include <stdint.h>

class tm_pace {
  public:
    // least: the lowest limit, which is the first one.
    explicit tm_pace(uint64_t least);

    // Bytes that may be under way; UINT64_MAX: all that have room.
    uint64_t limit() const { return limits[now]; }

    // Bytes have been moved while more wait for room.
    void moved(uint64_t bytes, int64_t now_ns);

    // Nothing waits for room: the time until `moved` tells nothing of the disk.
    void pause() { last_ns = 0; }

    // Bytes of a turn, and those before them that the limit of the turn before has let in.
    static const uint64_t TURN_BYTES = 192 << 20, FILL_BYTES = 64 << 20;

  private:
    enum { NUM_LIMITS = 3, NUM_TRIES = 8, FIRST_KEPT = 64, MOST_KEPT = 1024 };

    void end_turn();
    int fastest();

    uint64_t limits[NUM_LIMITS];
    int now = 0;
    int64_t times_ns[NUM_LIMITS][NUM_TRIES];
    int num_turns = 0;         // since trying began, or since a limit was kept
    int num_kept = FIRST_KEPT; // turns with the limit that is kept
    bool is_trying = true;
    uint64_t bytes = 0; // of this turn
    int64_t turn_ns = 0;
    int64_t last_ns = 0; // 0: paused
};

#endif
