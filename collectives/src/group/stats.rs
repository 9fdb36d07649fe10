//! Describes the memory that a group or an operation holds.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Space;

use crate::cost::Form;
use crate::plan::Algorithm;

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Inputs and outputs of operations, in the heap of the group.
    Heap,
    /// The contributions to reductions, in the heap of the group.
    Inboxes,
    /// Flags, in the heap of the group.
    Flags,
    /// Windows that Peerlane has allocated.
    Windows,
    /// Buffers that Peerlane has allocated for one operation, because ranks need unlike sizes.
    Buffers,
}

impl MemoryKind {
    /// Returns a short name of the kind for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Inboxes => "inboxes",
            Self::Flags => "flags",
            Self::Windows => "windows",
            Self::Buffers => "buffers",
        }
    }
}

/// The memory of one kind that this rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// What the memory is used for.
    pub kind: MemoryKind,
    /// The number of bytes.
    pub bytes: u64,
    /// Whether the host or only a device can access the memory.
    pub space: Space,
    /// The number of the GPU that has the memory, if it is memory of a GPU whose number is
    /// [known](super::Group::selection).
    pub device: Option<u32>,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, bytes, space, device } = self;
        write!(f, "{}: {bytes} bytes ", kind.name())?;
        match (space, device) {
            (Space::Host, _) => f.write_str("on the host"),
            (Space::Device, Some(device)) => write!(f, "on device {device}"),
            (Space::Device, None) => f.write_str("on the device"),
        }
    }
}

/// Describes what a group holds on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupStats {
    /// The memory that the group has allocated, by kind; without memory of the caller, and without
    /// the parts of a heap that a [split](super::Group::split) group has from the group before.
    pub memory: Vec<MemoryUse>,
    /// The counts of [immediate calls](super::Group::immediate).
    pub immediate: CallCounts,
    /// The numbers of immediate calls by algorithm and engine, largest first. Calls with
    /// [`splits`](super::Immediate::splits) are not counted.
    pub paths: Vec<CallPath>,
    /// The number of times that the fabric has moved a thread of this rank to another core, away
    /// from other ranks or processes.
    pub moves: u64,
}

impl GroupStats {
    /// Returns the number of bytes of all kinds together.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().map(|one| one.bytes).sum()
    }
}

/// Counts the immediate calls of a group on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallCounts {
    /// The number of calls.
    pub calls: u64,
    /// The number of calls that found an operation that was prepared before.
    pub hits: u64,
    /// The number of calls whose input or output was copied through memory of the group.
    pub copied: u64,
    /// The number of operations that are kept now.
    pub operations: usize,
    /// The number of bytes of the memory for copies.
    pub copy_bytes: u64,
}

/// Counts the immediate calls of one collective that ran with one algorithm on one kind of engines.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallPath {
    /// The name of the collective.
    pub collective: &'static str,
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// The algorithm that moved the blocks between ranks.
    pub algorithm: Algorithm,
    /// The kind of engines that executed the calls.
    pub engine: String,
    /// The number of calls.
    pub calls: u64,
}

impl CallPath {
    /// Adds the calls to those of the same path in `paths`.
    pub(super) fn add_to(self, paths: &mut Vec<Self>) {
        let Self { collective, form, algorithm, ref engine, calls } = self;
        let same = paths.iter_mut().find(|path| {
            path.collective == collective
                && (path.form, path.algorithm) == (form, algorithm)
                && path.engine == *engine
        });

        match same {
            Some(path) => path.calls += calls,
            None => paths.push(self),
        }
    }
}

/// Some bytes of one kind, in one kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) kind: MemoryKind,
    pub(super) space: Space,
    pub(super) bytes: u64,
}

/// Adds up memory by kind.
pub(super) fn summed(held: impl IntoIterator<Item = Held>, device: Option<u32>) -> Vec<MemoryUse> {
    let mut memory: Vec<MemoryUse> = Vec::new();
    for Held { kind, space, bytes } in held.into_iter().filter(|held| held.bytes > 0) {
        match memory.iter_mut().find(|one| (one.kind, one.space) == (kind, space)) {
            Some(one) => one.bytes += bytes,
            None => {
                let device = device.filter(|_| space == Space::Device);
                memory.push(MemoryUse { kind, bytes, space, device });
            }
        }
    }

    memory.sort_by_key(|one| one.kind);
    memory
}

/// Counts the bytes of buffers that Peerlane has allocated for operations, on the host and on the
/// device.
#[derive(Debug, Default)]
pub(super) struct BufferBytes([AtomicU64; 2]);

impl BufferBytes {
    pub(super) fn held(&self) -> impl Iterator<Item = Held> {
        let kind = MemoryKind::Buffers;
        [Space::Host, Space::Device].into_iter().zip(&self.0).map(move |(space, bytes)| Held {
            kind,
            space,
            bytes: bytes.load(Ordering::Relaxed),
        })
    }
}

/// Buffers of one operation, which count for the group until the operation is dropped.
#[derive(Debug)]
pub(super) struct CountedBuffers {
    total: Arc<BufferBytes>,
    own: [u64; 2],
}

impl CountedBuffers {
    pub(super) fn new(
        total: &Arc<BufferBytes>,
        buffers: impl Iterator<Item = (Space, u64)>,
    ) -> Self {
        let mut own = [0; 2];
        buffers.for_each(|(space, bytes)| own[usize::from(space == Space::Device)] += bytes);

        for (total, own) in total.0.iter().zip(own) {
            total.fetch_add(own, Ordering::Relaxed);
        }
        Self { total: Arc::clone(total), own }
    }
}

impl Drop for CountedBuffers {
    fn drop(&mut self) {
        for (total, own) in self.total.0.iter().zip(self.own) {
            total.fetch_sub(own, Ordering::Relaxed);
        }
    }
}
