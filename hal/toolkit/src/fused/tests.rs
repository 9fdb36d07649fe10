//! Tests how ops become programs, and that a program with any other content is refused.

use std::ops::Range;

use super::decode::check;
use super::{
    Addresses, COPY, Flat, LAST, MARK, OPS_MAX, PEERS_MAX, Program, ProgramOp, REDUCE, SYNC,
    compile,
};

const BYTES: u64 = 4096;
/// The memory of a rank, and the distance of what it has for even and for odd starts.
const RANK: u64 = 1 << 40;
const PARITY: u64 = 1 << 32;
const INPUT: u64 = 1 << 20;
const OUTPUT: u64 = 2 << 20;
const INBOX: u64 = 4 << 20;
const FLAGS: u64 = 8 << 20;
const INBOX_BYTES: u64 = 2 << 20;

/// Returns a place of a rank that is the same in all starts.
fn fixed(rank: usize, offset: u64) -> Addresses {
    Addresses([(rank as u64 + 1) * RANK + offset; 2])
}

/// Returns a place of a rank that even and odd starts use in turn.
fn in_turn(rank: usize, offset: u64) -> Addresses {
    let place = (rank as u64 + 1) * RANK + offset;
    Addresses([place, place + PARITY])
}

fn inbox(rank: usize, from: usize) -> Addresses {
    in_turn(rank, INBOX + from as u64 * 2 * BYTES)
}

fn flag(rank: usize, set: u64, from: usize) -> Addresses {
    in_turn(rank, FLAGS + set * 0x1000 + from as u64 * 0x80)
}

/// Returns the slots of rank 0 in all starts.
fn slots() -> Range<u64> {
    let first = inbox(0, 0).0[0];
    first..first + PARITY + INBOX_BYTES
}

fn copy(to: Addresses, from: Addresses, to_peer: bool) -> Flat {
    Flat::Copy { to, from, bytes: BYTES, to_peer }
}

fn signals(ranks: usize, set: u64) -> impl Iterator<Item = Flat> {
    (1..ranks).map(move |peer| Flat::Signal(flag(peer, set, 0)))
}

fn waits(ranks: usize, set: u64) -> impl Iterator<Item = Flat> {
    (1..ranks).map(move |peer| Flat::Wait(flag(0, set, peer)))
}

fn output(rank: usize, from: usize) -> Addresses {
    fixed(rank, OUTPUT + from as u64 * BYTES)
}

fn puts(ranks: usize) -> impl Iterator<Item = Flat> {
    (1..ranks).map(|peer| copy(inbox(peer, 0), fixed(0, INPUT), true))
}

fn reduction(ranks: usize, to: Addresses) -> Flat {
    let peers = (1..ranks).map(|peer| inbox(0, peer));
    let from = [fixed(0, INPUT)].into_iter().chain(peers).collect();
    Flat::Reduce { to, from, bytes: BYTES }
}

fn gather_tagged(ranks: usize) -> Vec<Flat> {
    let mut flat: Vec<Flat> = puts(ranks).collect();
    flat.push(copy(output(0, 0), fixed(0, INPUT), false));
    flat.extend(signals(ranks, 0).chain(waits(ranks, 0)));
    flat.extend((1..ranks).map(|peer| copy(output(0, peer), inbox(0, peer), false)));
    flat
}

fn gather_direct(ranks: usize) -> Vec<Flat> {
    let mut flat: Vec<Flat> = signals(ranks, 1).chain(waits(ranks, 1)).collect();
    flat.extend((0..ranks).map(|rank| copy(output(rank, 0), fixed(0, INPUT), rank > 0)));
    flat.extend(signals(ranks, 0).chain(waits(ranks, 0)));
    flat
}

/// Rank 0 sends its input, if its peers have ended the start before last.
fn broadcast_tagged(ranks: usize) -> Vec<Flat> {
    let began = |peer| Flat::WaitLast(flag(0, 2, peer));
    let mut flat: Vec<Flat> = (1..ranks).map(began).collect();
    flat.extend(puts(ranks));
    flat.extend(signals(ranks, 0));
    flat
}

fn reduce_at_once(ranks: usize) -> Vec<Flat> {
    let mut flat: Vec<Flat> = puts(ranks).collect();
    flat.extend(signals(ranks, 0).chain(waits(ranks, 0)));
    flat.push(reduction(ranks, output(0, 0)));
    flat
}

fn reduce_in_parts(ranks: usize) -> Vec<Flat> {
    let part = |peer: usize| fixed(0, INPUT + peer as u64 * BYTES);
    let mut flat: Vec<Flat> =
        (1..ranks).map(|peer| copy(inbox(peer, 0), part(peer), true)).collect();
    flat.extend(signals(ranks, 0).chain(waits(ranks, 0)));
    flat.push(reduction(ranks, output(0, 0)));
    flat.extend((1..ranks).map(|peer| copy(output(peer, 0), output(0, 0), true)));
    flat.extend(signals(ranks, 1).chain(waits(ranks, 1)));
    flat
}

/// Returns the kind of each op with the numbers of its sources and targets.
fn shape(flat: &[Flat], slots: Option<&Range<u64>>) -> Vec<(u32, u32, u32)> {
    let program = compile(flat, slots).unwrap();
    program.ops().iter().map(|op| (op.kind, op.sources, op.targets)).collect()
}

#[test]
fn ops_of_several_peers_are_grouped() {
    for ranks in [2, 4, 8] {
        let (all, peers) = (ranks as u32, ranks as u32 - 1);
        let slots = Some(slots());
        let tagged = |flat: &[Flat]| shape(flat, slots.as_ref());
        let one_source = if peers > 1 { 1 } else { peers };
        assert_eq!(
            tagged(&gather_tagged(ranks)),
            [(COPY, 1, all), (MARK, 0, peers), (COPY, peers, peers)]
        );
        assert_eq!(
            tagged(&broadcast_tagged(ranks)),
            [(LAST, peers, 0), (COPY, one_source, peers), (MARK, 0, peers)]
        );
        assert_eq!(
            shape(&gather_direct(ranks), None),
            [(SYNC, peers, peers), (COPY, 1, all), (SYNC, peers, peers)]
        );
        assert_eq!(
            tagged(&reduce_at_once(ranks)),
            [(COPY, one_source, peers), (MARK, 0, peers), (REDUCE, all, 1)]
        );
        assert_eq!(
            shape(&reduce_at_once(ranks), None),
            [(COPY, one_source, peers), (SYNC, peers, peers), (REDUCE, all, 1)]
        );
        assert_eq!(
            shape(&reduce_in_parts(ranks), None),
            [(COPY, peers, peers), (SYNC, peers, peers), (REDUCE, all, all), (SYNC, peers, peers)]
        );
    }
}

#[test]
fn longer_lists_are_split() {
    assert_eq!(
        shape(&gather_direct(10), None),
        [
            // The waits of a second list follow the first ones, whose signals are stored before.
            (SYNC, 0, 8),
            (SYNC, 8, 1),
            (SYNC, 1, 0),
            (COPY, 1, 8),
            (COPY, 1, 2),
            (SYNC, 0, 8),
            (SYNC, 8, 1),
            (SYNC, 1, 0)
        ]
    );
    assert_eq!(
        shape(&gather_tagged(9), Some(&slots())),
        [(COPY, 1, 8), (COPY, 1, 1), (MARK, 0, 8), (COPY, 8, 8)]
    );

    let text = compile(&reduce_at_once(9), None).unwrap_err().to_string();
    assert!(text.contains("adds 9 contributions, expected at most 8"), "{text}");
}

#[test]
fn a_program_has_few_ops() {
    let copies = |count: u64| -> Vec<Flat> {
        // No two have a source or a length in common.
        let copy = |index: u64| Flat::Copy {
            to: fixed(1, index << 16),
            from: fixed(0, index << 16),
            bytes: index + 1,
            to_peer: true,
        };
        (0..count).map(copy).collect()
    };
    assert_eq!(shape(&copies(OPS_MAX as u64), None).len(), OPS_MAX);
    let text = compile(&copies(OPS_MAX as u64 + 1), None).unwrap_err().to_string();
    assert!(text.contains("more than 12 ops"), "{text}");
}

#[test]
fn copies_of_several_tensors_and_chunks_are_grouped() {
    let tensor = |tensor: u64| 2 * BYTES * tensor;
    let put = |peer: usize, of: u64| {
        copy(fixed(peer, OUTPUT + tensor(of)), fixed(0, INPUT + tensor(of)), peer > 0)
    };
    let puts = (0..4).flat_map(|peer| (0..3).map(move |of| put(peer, of)));
    let flat: Vec<Flat> = puts.chain(signals(4, 0)).chain(waits(4, 0)).collect();
    assert_eq!(shape(&flat, None), [(COPY, 1, 4), (COPY, 1, 4), (COPY, 1, 4), (SYNC, 3, 3)]);

    // Chunks have one of two lengths. Neighbors without a flag between them are one copy.
    let chunk = |index: u64, bytes: u64, peer: usize| Flat::Copy {
        to: fixed(peer, OUTPUT + index * BYTES),
        from: fixed(0, INPUT + index * BYTES),
        bytes,
        to_peer: peer > 0,
    };
    let puts = (0..4).map(|at| chunk(at, BYTES - 0x80 * (at % 2), 1 + at as usize));
    let own = (0..4).map(|at| chunk(at, BYTES, 0));
    let flat: Vec<Flat> = puts.chain(signals(5, 0)).chain(own).collect();
    assert_eq!(shape(&flat, None), [(COPY, 2, 2), (COPY, 2, 2), (SYNC, 0, 4), (COPY, 1, 1)]);

    // What depends on each other stays in its order, and is refused as before.
    let [first, second, third] = [0, 1, 2].map(|it| fixed(0, it * BYTES));
    let chain = [copy(second, first, false), copy(third, second, false), copy(third, first, false)];
    assert!(compile(&chain, None).is_err());
}

/// A tagged all-to-all in which each pair of ranks has a length has an op for each block. So
/// `RANKS_OF_PAIRS_MAX` of the crate of collectives is 6.
#[test]
fn blocks_of_other_lengths_are_ops_of_their_own() {
    let exchange = |ranks: usize| -> Vec<Flat> {
        let bytes = |from: usize, to: usize| (1 + 8 * from + to) as u64;
        let sent = |peer: usize| Flat::Copy {
            to: if peer == 0 { output(0, 0) } else { inbox(peer, 0) },
            from: fixed(0, INPUT + peer as u64 * BYTES),
            bytes: bytes(0, peer),
            to_peer: peer > 0,
        };
        let taken = |peer: usize| Flat::Copy {
            to: output(0, peer),
            from: inbox(0, peer),
            bytes: bytes(peer, 0),
            to_peer: false,
        };
        let sent = (0..ranks).map(sent).chain(signals(ranks, 0)).chain(waits(ranks, 0));
        sent.chain((1..ranks).map(taken)).collect()
    };
    assert_eq!(shape(&exchange(6), Some(&slots())).len(), OPS_MAX);
    assert!(compile(&exchange(7), Some(&slots())).is_err());
}

/// The programs for a number of ranks.
fn programs(ranks: usize) -> [(Vec<Flat>, Option<Range<u64>>); 6] {
    [
        (gather_tagged(ranks), Some(slots())),
        (gather_direct(ranks), None),
        (broadcast_tagged(ranks), Some(slots())),
        (reduce_at_once(ranks), Some(slots())),
        (reduce_at_once(ranks), None),
        (reduce_in_parts(ranks), None),
    ]
}

/// Returns every op that differs from an op in one field or in one address.
fn other_ops(op: &ProgramOp) -> Vec<ProgramOp> {
    let mut others = Vec::new();
    let mut change = |change: &dyn Fn(&mut ProgramOp)| {
        let mut other = *op;
        change(&mut other);
        others.push(other);
    };
    (0..6).for_each(|kind| change(&|op| op.kind = kind));
    for count in (0..=PEERS_MAX as u32 + 1).chain([u32::MAX]) {
        change(&|op| op.sources = count);
        change(&|op| op.targets = count);
        change(&|op| (op.sources, op.targets) = (count, count));
    }
    (0..32).for_each(|bit| change(&|op| op.slots ^= 1 << bit));
    for bytes in [0, 1, op.bytes / 2, op.bytes.wrapping_sub(1), op.bytes + 1, u64::MAX] {
        change(&|op| op.bytes = bytes);
    }
    [0, 1, 2, 4, 8, 16, 32].into_iter().for_each(|align| change(&|op| op.align = align));
    for index in 0..PEERS_MAX {
        for parity in 0..2 {
            for difference in [1, 8, 16, BYTES, 1 << 63] {
                change(&|op| op.from[index].0[parity] ^= difference);
                change(&|op| op.to[index].0[parity] ^= difference);
            }
        }
        let next = (index + 1) % PEERS_MAX;
        change(&|op| op.from.swap(index, next));
        change(&|op| op.to.swap(index, next));
    }
    // Targets of one source have no order, but the first one of a reduction is its result.
    let targets = |op: &ProgramOp| {
        let first = u32::from(op.kind == REDUCE);
        let mut targets: Vec<_> = (first..op.targets.min(PEERS_MAX as u32))
            .map(|index| (op.to[index as usize].0, op.is_slot_target(index as usize)))
            .collect();
        targets.sort_unstable();
        targets
    };
    let has_order = op.kind == COPY && op.sources > 1;
    let is_same = |other: &ProgramOp| {
        let sorted = ProgramOp { to: op.to, ..*other };
        let first = op.kind == REDUCE && other.to[0] != op.to[0];
        other == op || !has_order && !first && sorted == *op && targets(other) == targets(op)
    };
    others.retain(|other| !is_same(other));
    others
}

#[test]
fn other_programs_are_refused() {
    for (flat, slots) in [2, 3, 8].into_iter().flat_map(programs) {
        let program = compile(&flat, slots.as_ref()).unwrap();
        let refuses = |other: &Program, what: &str| {
            assert!(check(other, &flat, slots.as_ref()).is_err(), "{what}: {:x?}", other.ops());
        };
        for index in 0..program.ops as usize {
            for op in other_ops(&program.op[index]) {
                let mut other = program;
                other.op[index] = op;
                refuses(&other, &format!("another op {index}"));
            }

            let mut swapped = program;
            swapped.op.swap(index, (index + 1) % program.ops as usize);
            refuses(&swapped, "another order");
        }
        for ops in (0..=OPS_MAX as u32 + 1).filter(|ops| *ops != program.ops) {
            refuses(&Program { ops, ..program }, "another number of ops");
        }
    }
}

#[test]
fn ops_that_depend_on_each_other_are_not_mixed() {
    let [first, second, third] = [0, 1, 2].map(|it| fixed(0, it * BYTES));
    // Each copy needs the one before, and there is no order inside of an op.
    let chain = [copy(second, first, false), copy(third, second, false)];
    assert!(compile(&chain, None).is_err());
    assert!(compile(&[copy(second, first, false), copy(second, third, false)], None).is_err());

    // With a synchronization between, one block handles the same bytes of both ops.
    let [put, copy_on] = chain;
    let sync = |rest: Flat| [put.clone(), Flat::Signal(flag(1, 0, 0)), rest];
    assert_eq!(shape(&sync(copy_on), None), [(COPY, 1, 1), (SYNC, 0, 1), (COPY, 1, 1)]);
    let half = Flat::Copy { to: third, from: second, bytes: BYTES / 2, to_peer: false };
    assert!(compile(&sync(half), None).is_err(), "the parts of blocks differ");
}

#[test]
fn slots_of_this_rank_hold_nothing_else() {
    let slots = slots();
    let program = |to: Addresses, from: Addresses| compile(&[copy(to, from, false)], Some(&slots));
    let [slot, plain] = [inbox(0, 1), fixed(0, OUTPUT)];
    assert!(program(plain, slot).is_ok());
    assert!(program(slot, plain).is_err(), "a plain target in the slots");
    assert!(program(plain, in_turn(0, INBOX + 8)).is_err(), "a misaligned slot");
    let last = slots.end - BYTES;
    assert!(program(plain, Addresses([last, last])).is_err(), "a slot beyond the end");
    let before = slots.start - BYTES / 2;
    assert!(
        program(plain, Addresses([before, before])).is_err(),
        "a source that reaches into slots"
    );

    let put = [copy(inbox(1, 0), fixed(0, INPUT), true)];
    assert!(compile(&put, Some(&slots)).is_ok());
    let put = [copy(in_turn(1, INBOX + 8), fixed(0, INPUT), true)];
    assert!(compile(&put, Some(&slots)).is_err(), "a misaligned slot of a peer");
}
