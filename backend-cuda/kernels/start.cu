// Runs a whole start of a collective operation on one rank by one launch, as the program says that hal/toolkit/src/fused has compiled.
//
// `cargo xtask kernels` generates start.ptx from this file. `start_copy` runs programs without reductions. The other kernels run all
// programs, one for the sum and one for the largest value of the elements of each size, and one more for the maximum of floating-point
// numbers; elements.cuh says how they are combined.
//
// All blocks run at the same time, and a block waits only for the blocks of the same index on other ranks, so there is no barrier of the
// grid. The words of an op with slots belong to threads, in all ops alike. The bytes of another op belong to blocks.

#include "elements.cuh"

// As in hal/toolkit/src/fused/mod.rs.
constexpr int PEERS_MAX = 8;
constexpr int OPS_MAX = 12;
constexpr int THREADS = 512;

// The number of polls between two looks at the host's word, which is far away.
constexpr uint32_t POLLS = 256;

// The address in even starts and that in odd ones.
struct Place {
    uint64_t at[2];
};

enum Kind : uint32_t { COPY, REDUCE, SYNC, MARK, LAST };

struct Head {
    uint32_t kind;
    uint32_t sources, targets;
    // Bit i: `from[i]` is a slot; bit 8 + i: `to[i]` is a slot.
    uint32_t slots;
    uint64_t bytes;
    // 16, 4 or 1. It divides the addresses of all places that are not slots.
    uint64_t align;
};

struct Op {
    Head head;
    Place from[PEERS_MAX], to[PEERS_MAX];
};

struct Program {
    uint64_t control, host;
    // What flags have in addition to the number of a start.
    uint64_t base;
    uint32_t ops, divisor;
    uint64_t flip;
    // By how many bits the number of a start is shifted in values, and what signals have there.
    uint32_t shift, digest;
    Op op[OPS_MAX];
};
static_assert(sizeof(Op) == 288 && sizeof(Program) == 3504, "the layout of hal/toolkit/src/fused/mod.rs");

// In memory of this device.
struct alignas(16) Control {
    // The number of the last start that has ended.
    uint64_t start;
    // How many blocks of this launch have ended.
    uint32_t arrived;
    // Not 0 if a block has left because of an abort.
    uint32_t gone;
};

// In memory of the host.
struct HostWords {
    uint32_t abort, reserved;
    uint64_t begun, done;
};

// What a thread knows of the start that it runs.
struct Start {
    uint64_t number;
    // The low bits of the number, which slots carry.
    uint32_t tag;
    // The index of the addresses of this start.
    uint32_t turn;
    // The least value that flags have in this start, and the one that this rank gives them.
    uint64_t value, signalled;
    // This thread stores nothing more and waits for nothing more.
    bool gone;
    const volatile HostWords *host;
};

static __device__ __forceinline__ uint64_t grid_thread() { return uint64_t(blockIdx.x) * THREADS + threadIdx.x; }
static __device__ __forceinline__ uint64_t grid_threads() { return uint64_t(gridDim.x) * THREADS; }

// Returns whether the host wants launches to end. `polls` counts from 1.
static __device__ __forceinline__ bool is_aborted(const Start &start, uint32_t polls) {
    return polls % POLLS == 0 && start.host->abort != 0;
}

// A word of a slot has 8 bytes of data, and takes 16 bytes: two halves, each with 4 bytes of data below the tag. Only each half is known to
// be atomic. Relaxed accesses suffice, as the tag of a half says whether its data is there.

static __device__ __forceinline__ Halves load_slot(uint64_t slot, uint64_t index) { return load_halves(slot + 16 * index); }

static __device__ __forceinline__ void store_slot(uint64_t slot, uint64_t index, uint64_t data, uint32_t tag) {
    const uint64_t tagged = uint64_t(tag) << 32;
    store_halves(slot + 16 * index, {tagged | uint32_t(data), tagged | data >> 32});
}

static __device__ __forceinline__ bool has_tag(Halves halves, uint32_t tag) {
    return uint32_t(halves.low >> 32) == tag && uint32_t(halves.high >> 32) == tag;
}

static __device__ __forceinline__ uint64_t data_of(Halves halves) { return halves.high << 32 | uint32_t(halves.low); }

// Whole words are those of 8 bytes in ops whose places are multiples of 16. The other ones are odd: the last word of a length that is no
// multiple of 8, and all words at places of another alignment. They are rare, so the code for them is short.

static __device__ __forceinline__ uint64_t whole_words(const Head &head) { return head.align == 16 ? head.bytes / 8 : 0; }
static __device__ __forceinline__ uint64_t all_words(const Head &head) { return (head.bytes + 7) / 8; }

// What a thread needs of an op for each word.
struct Lists {
    uint32_t sources, targets, slots, turn;
};

// Returns the lists of an op, which the compiler cannot know to be the same as before. Otherwise, it would keep the addresses of all places
// in registers, of which there are not enough, and would generate a loop for each combination of slots.
static __device__ __forceinline__ Lists lists_of(const Head &head, const Start &start) {
    Lists lists{head.sources, head.targets, head.slots, start.turn};
    forget(lists.sources, lists.targets, lists.slots, lists.turn);
    return lists;
}

// Returns whether a loop over all places can end before place `n`, as no place from there on is in the set. Only two places are asked for,
// since a branch for each place would take longer than it saves.
static __device__ __forceinline__ bool skips(uint32_t set, uint32_t n) { return (n == 2 || n == 4) && set >> n == 0; }

// Loads a whole word of each source. All loads are in flight before the first tag is looked at, and only what is not there is loaded again.
// Returns false after an abort.
// `words` must be initialised, as registers that a loop sets only on some paths are reserved during the whole kernel.
static __device__ __forceinline__ bool load_words(
    const Op &op, const Head &head, const Start &start, uint64_t index, Halves (&words)[PEERS_MAX]) {
    Lists lists = lists_of(head, start);
    const uint32_t used = (1u << lists.sources) - 1;
    const uint32_t plain = used & ~lists.slots;
#pragma unroll
    for (uint32_t n = 0; n < PEERS_MAX; n++) {
        if (skips(plain, n)) break;
        if (plain >> n & 1) {
            const uint64_t data = reinterpret_cast<const uint64_t *>(op.from[n].at[lists.turn])[index];
            words[n] = {data, data >> 32};
        }
    }

    uint32_t missing = used & lists.slots;
#pragma unroll 1
    for (uint32_t polls = 1; missing != 0; polls++) {
        lists = lists_of(head, start);
#pragma unroll
        for (uint32_t n = 0; n < PEERS_MAX; n++) {
            if (skips(missing, n)) break;
            if (missing >> n & 1) words[n] = load_slot(op.from[n].at[lists.turn], index);
        }
        uint32_t there = 0;
#pragma unroll
        for (uint32_t n = 0; n < PEERS_MAX; n++) {
            if (skips(missing, n)) break;
            if (has_tag(words[n], start.tag)) there |= 1u << n;
        }
        missing &= ~there;
        if (missing != 0 && is_aborted(start, polls)) return false;
    }
    return true;
}

// Stores a whole word in target `t`.
static __device__ __forceinline__ void store_word(
    const Op &op, const Start &start, Lists lists, uint32_t t, uint64_t index, uint64_t data) {
    const uint64_t to = op.to[t].at[lists.turn];
    if (lists.slots >> (PEERS_MAX + t) & 1) {
        store_slot(to, index, data, start.tag);
    } else {
        reinterpret_cast<uint64_t *>(to)[index] = data;
    }
}

// Returns the number of bytes of a word, at most 8.
static __device__ __forceinline__ uint32_t word_bytes(const Head &head, uint64_t index) {
    const uint64_t left = head.bytes - 8 * index;
    return left < 8 ? uint32_t(left) : 8;
}

// Loads an odd word of source `n`, padded with zeros. Returns false after an abort.
static __device__ __forceinline__ bool load_odd(
    const Op &op, const Head &head, const Start &start, Lists lists, uint32_t n, uint64_t index, uint64_t &data) {
    const uint64_t from = op.from[n].at[lists.turn];
    if (lists.slots >> n & 1) {
#pragma unroll 1
        for (uint32_t polls = 1;; polls++) {
            const Halves halves = load_slot(from, index);
            data = data_of(halves);
            if (has_tag(halves, start.tag)) return true;
            if (is_aborted(start, polls)) return false;
        }
    }

    const uint32_t count = word_bytes(head, index);
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(from) + 8 * index;
    data = 0;
    if (head.align != 1 && count == 8) {
        const uint32_t *parts = reinterpret_cast<const uint32_t *>(bytes);
        data = uint64_t(parts[1]) << 32 | parts[0];
    } else {
#pragma unroll 1
        for (uint32_t i = 0; i < count; i++) data |= uint64_t(bytes[i]) << 8 * i;
    }
    return true;
}

// Stores an odd word in target `t`.
static __device__ __forceinline__ void store_odd(
    const Op &op, const Head &head, const Start &start, Lists lists, uint32_t t, uint64_t index, uint64_t data) {
    const uint64_t to = op.to[t].at[lists.turn];
    const uint32_t count = word_bytes(head, index);
    uint8_t *bytes = reinterpret_cast<uint8_t *>(to) + 8 * index;
    if (lists.slots >> (PEERS_MAX + t) & 1) {
        // A reduction has made something else of the zeros of its sources.
        const uint64_t mask = ~uint64_t(0) >> (64 - 8 * count);
        store_slot(to, index, data & mask, start.tag);
    } else if (head.align != 1 && count == 8) {
        uint32_t *parts = reinterpret_cast<uint32_t *>(bytes);
        parts[0] = uint32_t(data);
        parts[1] = uint32_t(data >> 32);
    } else {
#pragma unroll 1
        for (uint32_t i = 0; i < count; i++) bytes[i] = uint8_t(data >> 8 * i);
    }
}

// Copies the whole words of one source that is not a slot. This is how most programs with slots begin.
static __device__ __forceinline__ void put_words(const Op &op, const Head &head, const Start &start) {
    const uint64_t *from = reinterpret_cast<const uint64_t *>(op.from[0].at[start.turn]);
    const uint64_t words = whole_words(head);
#pragma unroll 1
    for (uint64_t index = grid_thread(); index < words; index += grid_threads()) {
        const uint64_t data = from[index];
        const Lists lists = lists_of(head, start);
#pragma unroll 1
        for (uint32_t t = 0; t < lists.targets; t++) store_word(op, start, lists, t, index, data);
    }
}

// Copies the data of an op with slots.
static __device__ __forceinline__ void copy_words(const Op &op, const Head &head, Start &start) {
    const uint64_t whole = whole_words(head);
    const uint64_t all = all_words(head);
    if (head.sources == 1 && (head.slots & 1) == 0) {
        if (!start.gone) put_words(op, head, start);
    } else {
#pragma unroll 1
        for (uint64_t index = grid_thread(); index < whole && !start.gone; index += grid_threads()) {
            Halves words[PEERS_MAX] = {};
            start.gone = !load_words(op, head, start, index, words);
            if (start.gone) break;
            const Lists lists = lists_of(head, start);
#pragma unroll
            for (uint32_t t = 0; t < PEERS_MAX; t++) {
                if (t >= lists.targets) break;
                store_word(op, start, lists, t, index, data_of(lists.sources == 1 ? words[0] : words[t]));
            }
        }
    }

    if (whole == all) return;
#pragma unroll 1
    for (uint64_t index = grid_thread(); index < all; index += grid_threads()) {
        if (index < whole) continue;
        const Lists lists = lists_of(head, start);
        uint64_t data = 0;
#pragma unroll 1
        for (uint32_t t = 0; t < lists.targets && !start.gone; t++) {
            if (t < lists.sources) start.gone = !load_odd(op, head, start, lists, t, index, data);
            if (!start.gone) store_odd(op, head, start, lists, t, index, data);
        }
    }
}

// The bytes of an op without slots that belong to this block. They begin at a multiple of 16, and depend on the length of the op and on
// nothing else, so that they are the same ones on all ranks.
struct Part {
    uint64_t begin, end;
};

static __device__ __forceinline__ Part part_of(const Head &head) {
    const uint64_t vectors = (head.bytes + 15) / 16;
    const uint64_t part = 16 * ((vectors + gridDim.x - 1) / gridDim.x);
    const uint64_t begin = blockIdx.x * part;
    const uint64_t end = begin + part;
    return {begin < head.bytes ? begin : head.bytes, end < head.bytes ? end : head.bytes};
}

// Copies as many whole units as there are from `begin` on, and returns where they end.
template <typename Unit>
static __device__ __forceinline__ uint64_t copy_units(
    const Op &op, const Head &head, const Start &start, uint64_t begin, uint64_t end) {
    const uint64_t units = (end - begin) / sizeof(Unit);
#pragma unroll 1
    for (uint64_t first = threadIdx.x; first < units; first += LOADS * THREADS) {
        const uint64_t left = units - first;
        const uint64_t offset = begin + first * sizeof(Unit);
        Unit loaded[LOADS] = {};
#pragma unroll 1
        for (uint32_t t = 0; t < head.targets; t++) {
            // One source is loaded once, for all targets.
            if (t < head.sources) {
                const Unit *from = reinterpret_cast<const Unit *>(op.from[t].at[start.turn] + offset);
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    if (i * THREADS < left) loaded[i] = load_once(from + i * THREADS);
            }
            Unit *to = reinterpret_cast<Unit *>(op.to[t].at[start.turn] + offset);
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (i * THREADS < left) to[i * THREADS] = loaded[i];
        }
    }
    return begin + units * sizeof(Unit);
}

// Copies the data of an op without slots.
static __device__ __forceinline__ void copy_part(const Op &op, const Head &head, const Start &start) {
    const Part part = part_of(head);
    uint64_t begin = part.begin;
    if (head.align == 16) begin = copy_units<uint4>(op, head, start, begin, part.end);
    if (head.align == 4) begin = copy_units<uint32_t>(op, head, start, begin, part.end);
    copy_units<uint8_t>(op, head, start, begin, part.end);
}

// Combines elements of one type.
template <typename T, Operator OPERATOR> struct Reducer {
    using Sum = typename T::Sum;
    using Word = typename T::Word;
    using Element = typename T::Element;
    using Scale = typename T::Scale;

    // It is 0 for sums, which do not use it.
    Word flip;
    Scale by;

    __device__ explicit Reducer(const Program &program) : flip(Word(program.flip)), by(Scale(1) / Scale(program.divisor)) {}

    static __device__ __forceinline__ Sum begin() { return T::template start<OPERATOR>(); }
    __device__ __forceinline__ Sum add(Sum sum, Word word) const {
        return T::template add<OPERATOR>(sum, T::widen(OPERATOR == SUM ? word : Word(word ^ flip)));
    }
    __device__ __forceinline__ Word end(Sum sum) const {
        return OPERATOR == SUM ? T::narrow(T::scale(sum, by)) : Word(T::narrow(sum) ^ flip);
    }

    // The words of 8 bytes of data.
    static constexpr int WORDS = 8 / sizeof(Word);
    struct Sums {
        Sum of[WORDS];
    };

    static __device__ __forceinline__ Sums begin_data() {
        Sums sums;
#pragma unroll
        for (int w = 0; w < WORDS; w++) sums.of[w] = begin();
        return sums;
    }

    __device__ __forceinline__ void add_data(Sums &sums, uint64_t data) const {
#pragma unroll
        for (int w = 0; w < WORDS; w++) sums.of[w] = add(sums.of[w], Word(data >> 8 * sizeof(Word) * w));
    }

    __device__ __forceinline__ uint64_t end_data(const Sums &sums) const {
        uint64_t data = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) data |= uint64_t(end(sums.of[w])) << 8 * sizeof(Word) * w;
        return data;
    }

    // Combines the data of an op with slots.
    __device__ __forceinline__ void reduce_words(const Op &op, const Head &head, Start &start) const {
        const uint64_t whole = whole_words(head);
        const uint64_t all = all_words(head);
#pragma unroll 1
        for (uint64_t index = grid_thread(); index < all && !start.gone; index += grid_threads()) {
            Lists lists = lists_of(head, start);
            Sums sums = begin_data();
            if (index < whole) {
                Halves words[PEERS_MAX] = {};
                start.gone = !load_words(op, head, start, index, words);
#pragma unroll
                for (uint32_t n = 0; n < PEERS_MAX; n++) {
                    if (n >= lists.sources) break;
                    add_data(sums, data_of(words[n]));
                }
            } else {
#pragma unroll 1
                for (uint32_t n = 0; n < lists.sources && !start.gone; n++) {
                    uint64_t data = 0;
                    start.gone = !load_odd(op, head, start, lists, n, index, data);
                    add_data(sums, data);
                }
            }
            if (start.gone) return;

            const uint64_t data = end_data(sums);
            lists = lists_of(head, start);
#pragma unroll 1
            for (uint32_t t = 0; t < lists.targets; t++) {
                if (index < whole) {
                    store_word(op, start, lists, t, index, data);
                } else {
                    store_odd(op, head, start, lists, t, index, data);
                }
            }
        }
    }

    // Combines the data of an op without slots.
    __device__ __forceinline__ void reduce_part(const Op &op, const Head &head, const Start &start) const {
        constexpr int WORDS = 16 / sizeof(Word);
        // The loads of several sources are in flight if the sums of `LOADS` vectors would need more than half of the registers.
        constexpr int SOURCES = sizeof(Sum) * WORDS > 16 ? 2 : 1;
        constexpr int VECTORS = LOADS / SOURCES;
        const Part part = part_of(head);
        const uint64_t vectors = head.align == 16 ? (part.end - part.begin) / 16 : 0;
#pragma unroll 1
        for (uint64_t first = threadIdx.x; first < vectors; first += VECTORS * THREADS) {
            const uint64_t left = vectors - first;
            const uint64_t offset = part.begin + 16 * first;
            Sum sums[VECTORS][WORDS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
#pragma unroll
                for (int w = 0; w < WORDS; w++) sums[i][w] = begin();

#pragma unroll 1
            for (uint32_t n = 0; n < head.sources; n += SOURCES) {
                uint4 loaded[SOURCES][VECTORS] = {};
#pragma unroll
                for (int s = 0; s < SOURCES; s++)
                    if (n + s < head.sources) {
                        const uint4 *from = reinterpret_cast<const uint4 *>(op.from[n + s].at[start.turn] + offset);
#pragma unroll
                        for (int i = 0; i < VECTORS; i++)
                            if (i * THREADS < left) loaded[s][i] = load_once(from + i * THREADS);
                    }
#pragma unroll
                for (int s = 0; s < SOURCES; s++)
                    if (n + s < head.sources) {
#pragma unroll
                        for (int i = 0; i < VECTORS; i++)
#pragma unroll
                            for (int w = 0; w < WORDS; w++)
                                sums[i][w] = add(sums[i][w], reinterpret_cast<const Vector<Word> *>(&loaded[s][i])->words[w]);
                    }
            }

            Vector<Word> results[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
#pragma unroll
                for (int w = 0; w < WORDS; w++) results[i].words[w] = end(sums[i][w]);
#pragma unroll 1
            for (uint32_t t = 0; t < head.targets; t++) {
                uint4 *to = reinterpret_cast<uint4 *>(op.to[t].at[start.turn] + offset);
#pragma unroll
                for (int i = 0; i < VECTORS; i++)
                    if (i * THREADS < left) to[i * THREADS] = *reinterpret_cast<const uint4 *>(&results[i]);
            }
        }

        const uint64_t begin_elements = part.begin + 16 * vectors;
        const uint64_t count = (part.end - begin_elements) / sizeof(Element);
#pragma unroll 1
        for (uint64_t index = threadIdx.x; index < count; index += THREADS) {
            Sum sum = begin();
#pragma unroll 1
            for (uint32_t n = 0; n < head.sources; n++)
                sum = add(sum, Word(reinterpret_cast<const Element *>(op.from[n].at[start.turn] + begin_elements)[index]));
            const Element result = Element(end(sum));
#pragma unroll 1
            for (uint32_t t = 0; t < head.targets; t++)
                reinterpret_cast<Element *>(op.to[t].at[start.turn] + begin_elements)[index] = result;
        }
    }
};

// Programs without reductions.
struct NoReducer {
    __device__ explicit NoReducer(const Program &) {}
    __device__ __forceinline__ void reduce_words(const Op &, const Head &, Start &) const {}
    __device__ __forceinline__ void reduce_part(const Op &, const Head &, const Start &) const {}
};

// Polls a flag until it has a value. Returns false after an abort.
static __device__ __forceinline__ bool poll_flag(uint64_t flag, uint64_t awaited, const Start &start) {
#pragma unroll 1
    for (uint32_t polls = 1;; polls++) {
        if (load_flag(flag) >= awaited) return true;
        if (is_aborted(start, polls)) return false;
    }
}

// Signals the targets and awaits the sources. What all threads of this block have stored before is visible to the block of this index on a
// target when it has seen the signal, and likewise what those of a source have stored is visible here.
static __device__ __forceinline__ void synchronize(const Op &op, const Head &head, Start &start) {
    fence_for_barrier();
    // A block of which a thread has left signals nothing, as not all that it should have stored is stored.
    start.gone = any_of_block(start.gone);
    if (!start.gone && threadIdx.x < head.targets) {
        fence_for_peers();
        store_flag(op.to[threadIdx.x].at[start.turn] + 8 * blockIdx.x, start.signalled);
    }
    if (!start.gone && threadIdx.x < head.sources) {
        const uint64_t flag = op.from[threadIdx.x].at[start.turn] + 8 * blockIdx.x;
        start.gone = !poll_flag(flag, start.value, start);
    }
    start.gone = any_of_block(start.gone);
}

// Awaits the start before, if there is one, in the first words of the sources.
static __device__ __forceinline__ void await_last(const Op &op, const Head &head, uint32_t shift, Start &start) {
    if (!start.gone && threadIdx.x < head.sources) {
        const uint64_t flag = op.from[threadIdx.x].at[start.turn];
        const uint64_t last = start.value - (uint64_t(1) << shift);
        start.gone = !poll_flag(flag, start.number == 1 ? 0 : last, start);
    }
    start.gone = any_of_block(start.gone);
}

template <typename Reduces> static __device__ __forceinline__ void run(const Program &program) {
    const auto control = reinterpret_cast<Control *>(program.control);
    const auto host = reinterpret_cast<volatile HostWords *>(program.host);
    const uint4 seen = *reinterpret_cast<const uint4 *>(control);
    Start start;
    start.number = (uint64_t(seen.y) << 32 | seen.x) + 1;
    start.tag = uint32_t(start.number);
    start.turn = start.number & 1;
    start.value = program.base + (start.number << program.shift);
    start.signalled = start.value + program.digest;
    start.gone = seen.w != 0;
    start.host = host;
    // The last thread does so, as the first ones have data even in the shortest starts, and would wait here for the number.
    if (grid_thread() == THREADS - 1 && !start.gone) host->begun = start.number;

    const Reduces reducer(program);
#pragma unroll 1
    for (uint32_t n = 0; n < program.ops; n++) {
        const Op &op = program.op[n];
        // All loads of the head are in flight together, not one for each question below.
        Head head = op.head;
        forget(head.kind, head.sources, head.targets, head.slots);
        forget(head.bytes, head.align);
        if (head.kind == SYNC) {
            synchronize(op, head, start);
        } else if (head.kind == MARK) {
            if (!start.gone && grid_thread() < head.targets) store_flag(op.to[threadIdx.x].at[start.turn], start.signalled);
        } else if (head.kind == LAST) {
            await_last(op, head, program.shift, start);
        } else if (head.slots != 0) {
            if (head.kind == COPY) copy_words(op, head, start);
            if (head.kind == REDUCE) reducer.reduce_words(op, head, start);
        } else {
            // Other threads of this block can have stored what this one loads.
            __syncthreads();
            if (start.gone) continue;
            if (head.kind == COPY) copy_part(op, head, start);
            if (head.kind == REDUCE) reducer.reduce_part(op, head, start);
        }
    }

    start.gone = any_of_block(start.gone);
    if (threadIdx.x != 0) return;
    if (start.gone) {
        // The block does not arrive, so this start never becomes the last one that has ended.
        *const_cast<volatile uint32_t *>(&control->gone) = 1;
    } else if (gridDim.x == 1 || atomicAdd(&control->arrived, 1) == gridDim.x - 1) {
        *reinterpret_cast<uint4 *>(control) = make_uint4(uint32_t(start.number), uint32_t(start.number >> 32), 0, 0);
        host->done = start.number;
    }
}

// Two blocks fit on a multiprocessor.
#define KERNEL(name, ...)                                                                                              \
    extern "C" __global__ void LAUNCH_BOUNDS(THREADS, 2) start_##name(const __grid_constant__ Program program) {       \
        run<__VA_ARGS__>(program);                                                                                     \
    }
#define KERNELS(name, type) KERNEL(sum_##name, Reducer<type, SUM>) KERNEL(max_##name, Reducer<type, MAX>)
#define FLOATS(name, type) KERNELS(name, type) KERNEL(maximum_##name, Reducer<type, MAXIMUM>)

KERNEL(copy, NoReducer)
KERNELS(u8, Packed<uint8_t>)
KERNELS(u16, Packed<uint16_t>)
KERNELS(u32, Integer<uint32_t>)
KERNELS(u64, Integer<uint64_t>)
FLOATS(f16, Short<Half>)
FLOATS(bf16, Short<BFloat>)
FLOATS(f32, Float<float>)
FLOATS(f64, Float<double>)
