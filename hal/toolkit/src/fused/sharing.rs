//! Checks which ops of a program use the same memory, because threads do not wait for each other
//! between most ops.

use super::{Addresses, COPY, Program, ProgramOp, REDUCE, SYNC, slot_bytes};

/// A place that an op reads or writes, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    place: Addresses,
    bytes: u64,
    is_written: bool,
}

impl Span {
    /// Returns whether both have a byte in common in even or in odd starts, and one writes it.
    fn conflicts(&self, other: &Self) -> bool {
        let mut starts = self.place.0.iter().zip(&other.place.0);
        let overlaps = |(first, second): (&u64, &u64)| {
            *first < second + other.bytes && *second < first + self.bytes
        };
        (self.is_written || other.is_written) && starts.any(overlaps)
    }

    fn is_same_memory(&self, other: &Self) -> bool {
        (self.place, self.bytes) == (other.place, other.bytes)
    }
}

/// Returns whether no op depends on the order of its own copies, and whether one thread handles
/// every byte that one op writes and another one accesses. If a synchronization is between these
/// ops, one block is enough.
pub(super) fn is_ordered(program: &Program) -> bool {
    let ops = program.ops();
    ops.iter().enumerate().all(|(index, op)| {
        let spans = spans(op);
        is_independent(op, &spans)
            && ops[..index].iter().enumerate().all(|(earlier, other)| {
                let is_synchronized = ops[earlier..index].iter().any(|it| it.kind == SYNC);
                // Words of slots belong to the same threads in all ops, and parts to blocks.
                let is_alike = (op.slots != 0) == (other.slots != 0);
                let is_one_thread = is_alike && (op.slots != 0 || is_synchronized);
                self::spans(other).iter().all(|earlier| {
                    let mut conflicts = spans.iter().filter(|span| span.conflicts(earlier));
                    conflicts.all(|span| is_one_thread && span.is_same_memory(earlier))
                })
            })
    })
}

/// Returns whether the places of an op do not depend on each other. A reduction can write to one of
/// its sources, element by element.
fn is_independent(op: &ProgramOp, spans: &[Span]) -> bool {
    spans.iter().enumerate().all(|(index, span)| {
        spans[..index].iter().filter(|other| span.conflicts(other)).all(|other| {
            op.kind == REDUCE && span.is_written != other.is_written && span.is_same_memory(other)
        })
    })
}

fn spans(op: &ProgramOp) -> Vec<Span> {
    if !matches!(op.kind, COPY | REDUCE) {
        return Vec::new();
    }

    let length = |is_slot| if is_slot { slot_bytes(op.bytes) } else { op.bytes };
    let sources = op.sources().iter().enumerate().map(|(index, place)| {
        let bytes = length(op.is_slot_source(index));
        Span { place: *place, bytes, is_written: false }
    });
    let targets = op.targets().iter().enumerate().map(|(index, place)| {
        let bytes = length(op.is_slot_target(index));
        Span { place: *place, bytes, is_written: true }
    });
    sources.chain(targets).collect()
}
