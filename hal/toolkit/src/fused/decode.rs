//! Checks that a program does what the ops of its start say, and nothing else.

use std::ops::Range;

use super::sharing::is_ordered;
use super::{
    Addresses, COPY, Flat, LAST, MARK, OPS_MAX, PEERS_MAX, Program, ProgramOp, REDUCE, SYNC,
    slot_bytes,
};
use crate::Fault;

/// Checks that a program has the same effects as the ops of a start, in the same order.
///
/// # Errors
/// [`Fault::Unavailable`], with the first difference.
pub(super) fn check(
    program: &Program,
    flat: &[Flat],
    slots: Option<&Range<u64>>,
) -> Result<(), Fault> {
    if program.ops as usize > OPS_MAX || !program.ops().iter().all(|op| is_well_formed(op, slots)) {
        let text = "the program of a start has an op that no kernel runs".to_owned();
        return Err(Fault::Unavailable(text));
    }

    let decoded: Vec<Flat> = program.ops().iter().flat_map(steps).collect();
    // Waits for slots have become polls of the slots.
    let is_kept = |step: &&Flat| slots.is_none() || !matches!(step, Flat::Wait(_));
    let expected: Vec<Flat> = flat.iter().filter(is_kept).cloned().collect();

    let has_slots = slots.is_some();
    let (decoded, expected) = (normal(&decoded, has_slots), normal(&expected, has_slots));
    if decoded.len() != expected.len() {
        let (has, expected) = (decoded.len(), expected.len());
        let text = format!("the program of a start has {has} steps, expected {expected}");
        return Err(Fault::Unavailable(text));
    }
    for (has, expected) in decoded.iter().zip(&expected) {
        if !is_same(has, expected, has_slots) {
            let text = format!("the program of a start has {has:x?}, expected {expected:x?}");
            return Err(Fault::Unavailable(text));
        }
    }

    if !program.ops().iter().all(|op| slots_are_right(op, slots)) {
        let text = "the program of a start mixes slots and other memory".to_owned();
        return Err(Fault::Unavailable(text));
    }
    if !is_ordered(program) {
        let text = "ops of a start share memory that different threads would handle".to_owned();
        return Err(Fault::Unavailable(text));
    }
    Ok(())
}

/// Divides steps into runs of copies and single other steps.
pub(super) fn runs(flat: &[Flat]) -> impl Iterator<Item = &[Flat]> {
    let is_copy = |step: &Flat| matches!(step, Flat::Copy { .. });
    flat.chunk_by(move |step, next| is_copy(step) && is_copy(next))
}

/// Returns whether no copy of a run reads or writes what another one writes.
pub(super) fn are_independent(run: &[Flat]) -> bool {
    let copies: Vec<(Addresses, Addresses, u64)> = run
        .iter()
        .filter_map(|step| match *step {
            Flat::Copy { to, from, bytes, .. } => Some((to, from, bytes)),
            _ => None,
        })
        .collect();
    let overlaps = |(one, length): (Addresses, u64), (other, other_length): (Addresses, u64)| {
        let mut starts = one.0.iter().zip(&other.0);
        starts.any(|(one, other)| {
            *one < other.saturating_add(other_length) && *other < one.saturating_add(length)
        })
    };

    copies.iter().enumerate().all(|(index, &(to, from, bytes))| {
        copies[..index].iter().all(|&(earlier_to, earlier_from, earlier_bytes)| {
            // Slots are longer than their data, but they begin at the same places.
            let [written, earlier] = [(to, bytes), (earlier_to, earlier_bytes)];
            !overlaps(written, earlier)
                && !overlaps(written, (earlier_from, earlier_bytes))
                && !overlaps((from, bytes), earlier)
        })
    })
}

/// Returns copies that do not depend on each other, of which two are one if the second one goes on
/// where the first one ends.
pub(super) fn joined(run: &[Flat]) -> Vec<Flat> {
    let mut joined: Vec<Flat> = Vec::with_capacity(run.len());
    for step in run {
        match (joined.last_mut(), step) {
            (Some(last), Flat::Copy { bytes: more, .. }) if goes_on(last, step) => {
                if let Flat::Copy { bytes, .. } = last {
                    *bytes += more;
                }
            }
            _ => joined.push(step.clone()),
        }
    }
    joined
}

/// Returns whether a copy begins where another one ends, at both of its ends.
fn goes_on(last: &Flat, next: &Flat) -> bool {
    let (
        Flat::Copy { to, from, bytes, to_peer },
        Flat::Copy { to: next_to, from: next_from, to_peer: is_next_to_peer, .. },
    ) = (last, next)
    else {
        return false;
    };

    let behind = |place: &Addresses| Addresses(place.0.map(|one| one.saturating_add(*bytes)));
    behind(to) == *next_to && behind(from) == *next_from && to_peer == is_next_to_peer
}

/// Returns the steps with each run of copies that do not depend on each other in one order, and
/// joined if there are no slots.
fn normal(flat: &[Flat], has_slots: bool) -> Vec<Flat> {
    let place = |step: &Flat| match step {
        // Copies that go on with each other have the same distances.
        Flat::Copy { to, from, bytes, .. } => {
            let distance = [0, 1].map(|turn| to.0[turn].wrapping_sub(from.0[turn]));
            (distance, from.0, *bytes)
        }
        _ => Default::default(),
    };
    let runs = runs(flat).flat_map(|run| {
        let mut steps = run.to_vec();
        if !are_independent(run) {
            return steps;
        }
        steps.sort_by_key(place);
        if has_slots { steps } else { joined(&steps) }
    });
    runs.collect()
}

/// Returns the steps of an op, in their order.
fn steps(op: &ProgramOp) -> Vec<Flat> {
    let bytes = op.bytes;
    let copy = |to: Addresses, from: Addresses, is_slot: bool| Flat::Copy {
        to,
        from,
        bytes,
        to_peer: is_slot,
    };

    match op.kind {
        COPY => {
            let from = |index: usize| op.from[if op.sources == 1 { 0 } else { index }];
            let targets = op.targets().iter().enumerate();
            targets.map(|(index, to)| copy(*to, from(index), op.is_slot_target(index))).collect()
        }
        REDUCE => {
            let [to, passed_on @ ..] = op.targets() else { return Vec::new() };
            let reduce = Flat::Reduce { to: *to, from: op.sources().to_vec(), bytes };
            let passed_on = passed_on.iter().map(|target| copy(*target, *to, false));
            [reduce].into_iter().chain(passed_on).collect()
        }
        SYNC | MARK => {
            let signals = op.targets().iter().map(|flag| Flat::Signal(*flag));
            signals.chain(op.sources().iter().map(|flag| Flat::Wait(*flag))).collect()
        }
        LAST => op.sources().iter().map(|flag| Flat::WaitLast(*flag)).collect(),
        _ => Vec::new(),
    }
}

/// Returns whether two steps have the same effect. A decoded copy goes to a slot exactly if it goes
/// to a peer and the data of peers is tagged.
fn is_same(has: &Flat, expected: &Flat, is_tagged: bool) -> bool {
    match (has, expected) {
        (
            Flat::Copy { to, from, bytes, to_peer: to_slot },
            Flat::Copy { to: expected_to, from: expected_from, bytes: expected_bytes, to_peer },
        ) => {
            (to, from, bytes) == (expected_to, expected_from, expected_bytes)
                && *to_slot == (*to_peer && is_tagged)
        }
        _ => has == expected,
    }
}

/// Returns whether the lists, the kind and the alignment of an op are such that kernels run it as
/// [`steps`] says. Entries that are not used are zero.
fn is_well_formed(op: &ProgramOp, slots: Option<&Range<u64>>) -> bool {
    let (sources, targets) = (op.sources as usize, op.targets as usize);
    if sources > PEERS_MAX || targets > PEERS_MAX {
        return false;
    }

    let unused = op.from[sources..].iter().chain(&op.to[targets..]);
    let has_lists = match op.kind {
        COPY => targets > 0 && (sources == 1 || sources == targets),
        REDUCE => targets > 0 && sources > 0,
        // Signals of tagged data follow no data, and others always do.
        SYNC => slots.is_none() && sources + targets > 0,
        MARK => slots.is_some() && sources == 0 && targets > 0,
        LAST => sources > 0 && targets == 0,
        _ => false,
    };
    let has_data = matches!(op.kind, COPY | REDUCE);
    let (source_bits, target_bits) = ((1 << sources) - 1, ((1 << targets) - 1) << PEERS_MAX);
    // Results go to slots by copies of their own.
    let bits = if op.kind == COPY { source_bits | target_bits } else { source_bits };
    has_lists
        && unused.copied().all(|place| place == Addresses::default())
        && op.align == op.alignment()
        && (op.bytes > 0) == has_data
        && op.slots & !(if has_data { bits } else { 0 }) == 0
}

/// Returns whether exactly the sources in the slots of this rank are marked as slots, whether slots
/// are whole words, and whether no other place has bytes of the slots of this rank.
fn slots_are_right(op: &ProgramOp, slots: Option<&Range<u64>>) -> bool {
    let Some(slots) = slots else { return op.slots == 0 };
    if !matches!(op.kind, COPY | REDUCE) {
        return true;
    }

    let is_whole = |address: u64| address.is_multiple_of(slot_bytes(1));
    let is_apart = |address: u64| address + op.bytes <= slots.start || slots.end <= address;
    let is_source = |index: usize, address: u64| match op.is_slot_source(index) {
        true => {
            let is_inside = slots.contains(&address) && address + slot_bytes(op.bytes) <= slots.end;
            is_inside && is_whole(address)
        }
        false => is_apart(address),
    };
    let is_target = |index: usize, address: u64| match op.is_slot_target(index) {
        true => is_whole(address),
        false => is_apart(address),
    };
    let all = |places: &[Addresses], is_right: &dyn Fn(usize, u64) -> bool| {
        let mut places = places.iter().enumerate();
        places.all(|(index, place)| place.0.iter().all(|address| is_right(index, *address)))
    };
    all(op.sources(), &is_source) && all(op.targets(), &is_target)
}
