//! Groups the ops of a start by what one op of a program can do for several peers.

use std::ops::Range;

use super::Flat;
use super::decode::{are_independent, check, joined, runs};
use super::{Addresses, COPY, LAST, MARK, OPS_MAX, PEERS_MAX, Program, ProgramOp, REDUCE, SYNC};
use crate::Fault;

/// Compiles the ops of a start.
///
/// `slots` are the addresses of the slots of this rank, if the data that peers put is tagged. All
/// data then goes to slots of peers, and all waits for flags of the start itself announce slots.
///
/// # Errors
/// [`Fault::Unavailable`] if a start has an op that no program has, or more ops than a program.
pub fn compile(flat: &[Flat], slots: Option<&Range<u64>>) -> Result<Program, Fault> {
    let mut program = Program { divisor: 1, ..Program::default() };
    let grouped = grouped(flat, slots.is_some());
    let mut rest = &grouped[..];
    while !rest.is_empty() {
        let (op, taken) = match slots {
            Some(slots) => tagged(rest, slots)?,
            None => direct(rest)?,
        };
        rest = &rest[taken..];

        // A wait for slots has no op of its own.
        let Some(op) = op else { continue };
        if program.ops as usize == OPS_MAX {
            let text = format!("the start has more than {OPS_MAX} ops of a program");
            return Err(Fault::Unavailable(text));
        }
        program.op[program.ops as usize] = ProgramOp { align: op.alignment(), ..op };
        program.ops += 1;
    }

    // What runs is what was proven, whatever the code above has made of it.
    check(&program, flat, slots)?;
    Ok(program)
}

/// Returns the steps with the copies of one source next to each other, and those of one length,
/// where copies do not depend on each other. Starts of several tensors or chunks have them apart.
///
/// Otherwise the order stays, in which no two ranks store to the same peer first.
fn grouped(flat: &[Flat], has_slots: bool) -> Vec<Flat> {
    let mut grouped: Vec<Flat> = Vec::with_capacity(flat.len());
    for run in runs(flat) {
        if !are_independent(run) {
            grouped.extend_from_slice(run);
            continue;
        }

        // Slots of neighbors are no neighbors.
        let run = if has_slots { run.to_vec() } else { joined(run) };
        let of_lengths = by_first(&run, length);
        grouped.extend(of_lengths.iter().flat_map(|alike| by_first(alike, source)).flatten());
    }
    grouped
}

fn source(step: &Flat) -> Option<Addresses> {
    match step {
        Flat::Copy { from, .. } => Some(*from),
        _ => None,
    }
}

fn length(step: &Flat) -> Option<u64> {
    match step {
        Flat::Copy { bytes, .. } => Some(*bytes),
        _ => None,
    }
}

/// Returns groups of steps with equal keys, in the order of the first step of each.
fn by_first<K: PartialEq>(steps: &[Flat], key: impl Fn(&Flat) -> K) -> Vec<Vec<Flat>> {
    let mut groups: Vec<(K, Vec<Flat>)> = Vec::new();
    for step in steps {
        let of_step = key(step);
        match groups.iter_mut().find(|(other, _)| *other == of_step) {
            Some((_, group)) => group.push(step.clone()),
            None => groups.push((of_step, vec![step.clone()])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Returns the op of a program that does what the first steps do, and the number of these steps.
fn direct(flat: &[Flat]) -> Result<(Option<ProgramOp>, usize), Fault> {
    let (op, taken) = match &flat[0] {
        Flat::Copy { .. } => copies(flat, |_| true),
        Flat::Reduce { to, from, bytes } => {
            let mut op = reduction(to, from, *bytes)?;
            // The result goes to peers as well, without a second pass over memory.
            let passes_on = |step: &&Flat| match step {
                Flat::Copy { from, bytes: copied, .. } => from == to && copied == bytes,
                _ => false,
            };
            let copies = flat[1..].iter().take_while(passes_on).take(PEERS_MAX - 1);
            for target in copies.clone().filter_map(target) {
                push(&mut op.to, &mut op.targets, target);
            }
            (op, 1 + copies.count())
        }
        Flat::Signal(_) | Flat::Wait(_) => synchronization(flat),
        Flat::WaitLast(_) => last(flat),
    };
    Ok((Some(op), taken))
}

/// Returns the op of a program with slots that does what the first steps do, if it takes one, and
/// the number of these steps.
fn tagged(flat: &[Flat], slots: &Range<u64>) -> Result<(Option<ProgramOp>, usize), Fault> {
    let is_slot = |place: &Addresses| place.0.iter().all(|address| slots.contains(address));

    Ok(match &flat[0] {
        Flat::Copy { from, .. } => {
            let takes = is_slot(from);
            let is_alike = |step: &Flat| match step {
                Flat::Copy { from, .. } => is_slot(from) == takes,
                _ => false,
            };
            let (mut op, taken) = copies(flat, is_alike);

            for (index, step) in flat[..taken].iter().enumerate() {
                if let Flat::Copy { to_peer: true, .. } = step {
                    op.slots |= 1 << (PEERS_MAX + index);
                }
            }
            if takes {
                op.slots |= (1 << op.sources) - 1;
            }
            (Some(op), taken)
        }
        Flat::Reduce { to, from, bytes } => {
            let mut op = reduction(to, from, *bytes)?;
            let is_tagged = from.iter().enumerate().filter(|(_, place)| is_slot(place));
            op.slots = is_tagged.fold(0, |slots, (index, _)| slots | 1 << index);
            (Some(op), 1)
        }
        Flat::Signal(_) => {
            let mut op = ProgramOp { kind: MARK, ..ProgramOp::default() };
            let signals = flat.iter().map_while(|step| match step {
                Flat::Signal(flag) => Some(*flag),
                _ => None,
            });
            signals.take(PEERS_MAX).for_each(|flag| push(&mut op.to, &mut op.targets, flag));
            (Some(op), op.targets as usize)
        }
        Flat::Wait(_) => (None, 1),
        Flat::WaitLast(_) => {
            let (op, taken) = last(flat);
            (Some(op), taken)
        }
    })
}

/// Returns an op for as many of the first steps as one can do: copies of one source, or of one
/// length. `is_alike` says which steps may follow the first one.
fn copies(flat: &[Flat], is_alike: impl Fn(&Flat) -> bool) -> (ProgramOp, usize) {
    let copy = |step: &Flat| match step {
        Flat::Copy { to, from, bytes, .. } if is_alike(step) => Some((*to, *from, *bytes)),
        _ => None,
    };
    let alike = flat.iter().map_while(copy);
    let first = alike.clone().next().unwrap_or_default();
    let alike = alike.take_while(|(_, _, bytes)| *bytes == first.2).take(PEERS_MAX);

    let mut op = ProgramOp { kind: COPY, bytes: first.2, ..ProgramOp::default() };
    let from_first = alike.clone().take_while(|(_, from, _)| *from == first.1).count();
    // Two copies of one source are one op; else each copy has a source of its own.
    let taken = if from_first > 1 { from_first } else { alike.clone().count() };
    for (index, (to, from, _)) in alike.take(taken).enumerate() {
        push(&mut op.to, &mut op.targets, to);
        if index == 0 || from_first == 1 {
            push(&mut op.from, &mut op.sources, from);
        }
    }
    (op, taken)
}

fn reduction(to: &Addresses, from: &[Addresses], bytes: u64) -> Result<ProgramOp, Fault> {
    if from.len() > PEERS_MAX {
        let text =
            format!("the start adds {} contributions, expected at most {PEERS_MAX}", from.len());
        return Err(Fault::Unavailable(text));
    }

    let mut op = ProgramOp { kind: REDUCE, bytes, ..ProgramOp::default() };
    push(&mut op.to, &mut op.targets, *to);
    from.iter().for_each(|place| push(&mut op.from, &mut op.sources, *place));
    Ok(op)
}

/// Returns an op for the first signals and the waits behind them.
fn synchronization(flat: &[Flat]) -> (ProgramOp, usize) {
    let mut op = ProgramOp { kind: SYNC, ..ProgramOp::default() };
    let mut taken = 0;
    for step in flat {
        match step {
            // A signal behind a wait must not be earlier than the wait.
            Flat::Signal(flag) if op.sources == 0 && (op.targets as usize) < PEERS_MAX => {
                push(&mut op.to, &mut op.targets, *flag);
            }
            Flat::Wait(flag) if (op.sources as usize) < PEERS_MAX => {
                push(&mut op.from, &mut op.sources, *flag);
            }
            _ => break,
        }
        taken += 1;
    }
    (op, taken)
}

/// Returns an op for the first waits for signals of the start before.
fn last(flat: &[Flat]) -> (ProgramOp, usize) {
    let mut op = ProgramOp { kind: LAST, ..ProgramOp::default() };
    let waits = flat.iter().map_while(|step| match step {
        Flat::WaitLast(flag) => Some(*flag),
        _ => None,
    });
    waits.take(PEERS_MAX).for_each(|flag| push(&mut op.from, &mut op.sources, flag));
    (op, op.sources as usize)
}

fn target(step: &Flat) -> Option<Addresses> {
    match step {
        Flat::Copy { to, .. } => Some(*to),
        _ => None,
    }
}

fn push(list: &mut [Addresses; PEERS_MAX], count: &mut u32, place: Addresses) {
    list[*count as usize] = place;
    *count += 1;
}
