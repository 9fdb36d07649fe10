//! Compiles the ops of a start into a program, which one launch of a kernel runs.
//!
//! A program is a list of few ops with addresses. An op names all peers that it concerns, because a
//! kernel takes about half a microsecond for each op (docs/adr/0031-fused-starts.md). Kernels read
//! [`Program`] as their only parameter, so it has the layout of `backend-cuda/kernels/start.cu`.
//!
//! A start has a number, counted from 1 in memory of the device. Even and odd starts can use
//! different memory by turns, so each place has two addresses. A signal stores the number of the
//! start plus [`Program::base`], and a wait ends when its flag has at least this value. Low bits of
//! the value can hold a digest of the start: the number is then shifted by [`Program::shift`].
//!
//! # Blocks
//! All blocks of threads of a launch run at the same time, and each runs the whole program on its
//! part of the bytes. A flag is one word for each block. So block `b` waits only for the blocks `b`
//! of the peers, and the blocks of a launch never wait for each other: what is proven for the ops
//! holds for the part of each block. For that, the same bytes must belong to the same block on all
//! ranks, which depends on the length of an op and on nothing else.
//!
//! # Slots
//! Short data carries the number of its start. In a slot, each 8 bytes of data take 16 bytes: 4
//! bytes of data, the low 32 bits of the number, which are the tag, and the same again. A reader
//! polls the words until they have the tag of its start. So no flag follows the data, and a wait
//! for a flag that announces a slot becomes a poll of the slot. Its signal stays, because a host
//! finds by the flags which ranks have not entered a start. Waits for signals of the start before
//! announce no slot, and stay too.
//!
//! A slot holds nothing but words of one program, which overwrites every one of them in every other
//! start. So a word has the tag of the start before last until it has that of this start, also when
//! the tags begin again from 0. Before the first start, slots are zero.

mod blocks;
mod compile;
mod decode;
mod sharing;
#[cfg(test)]
mod tests;

pub use blocks::{DeviceKey, ReservedBlocks};
pub use compile::compile;

/// The largest number of entries of a list of an op.
pub const PEERS_MAX: usize = 8;
/// The largest number of ops of a program.
pub const OPS_MAX: usize = 12;
/// The number of threads in a block.
pub const THREADS: u32 = 512;
/// The number of bytes of data in a word of a slot, and the number of bytes of the word.
pub const SLOT_DATA_BYTES: u64 = 8;
const SLOT_WORD_BYTES: u64 = 16;

/// Returns the number of bytes of a slot for so many bytes of data.
pub const fn slot_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(SLOT_DATA_BYTES) * SLOT_WORD_BYTES
}

/// A place in memory: its address in even starts, and that in odd ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses(pub [u64; 2]);

/// An op of a start, with the addresses of its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flat {
    /// Copies bytes.
    Copy {
        /// The destination.
        to: Addresses,
        /// The source.
        from: Addresses,
        /// The number of bytes, at least 1.
        bytes: u64,
        /// Whether the destination is in memory of a peer.
        to_peer: bool,
    },
    /// Combines memory element by element.
    Reduce {
        /// The place of the result.
        to: Addresses,
        /// The sources, in the order in which they are combined.
        from: Vec<Addresses>,
        /// The number of bytes, at least 1.
        bytes: u64,
    },
    /// Stores the number of the start in a flag of a peer.
    Signal(Addresses),
    /// Waits until a flag of this rank has the number of the start.
    Wait(Addresses),
    /// Waits until a flag of this rank has the number of the start before, which says that the peer
    /// has begun that start, and so has ended all earlier ones.
    WaitLast(Addresses),
}

/// Copies bytes, from one source to all targets or from each source to its target.
pub const COPY: u32 = 0;
/// Combines the sources in their order, and stores the result in every target.
pub const REDUCE: u32 = 1;
/// Signals the targets, and waits for the sources, behind all ops before and ahead of those after.
pub const SYNC: u32 = 2;
/// Signals the targets, in any order with other stores.
pub const MARK: u32 = 3;
/// Waits until the first words of the sources have the number of the start before, if there is one.
/// A peer signals such a flag when it begins a start, so the first of its blocks says it for all.
pub const LAST: u32 = 4;

/// An op of a program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramOp {
    /// [`COPY`], [`REDUCE`], [`SYNC`], [`MARK`] or [`LAST`].
    pub kind: u32,
    /// The number of entries of [`from`](Self::from) that are used.
    pub sources: u32,
    /// The number of entries of [`to`](Self::to) that are used.
    pub targets: u32,
    /// The entries that are slots: bit `i` for `from[i]`, and bit `8 + i` for `to[i]`.
    pub slots: u32,
    /// The number of bytes of data at each place.
    pub bytes: u64,
    /// The largest of 16, 4 and 1 that divides the addresses of all places that are not slots.
    pub align: u64,
    /// The sources, or the flags of this rank that are awaited.
    pub from: [Addresses; PEERS_MAX],
    /// The targets, or the flags of peers that are signalled.
    pub to: [Addresses; PEERS_MAX],
}

impl ProgramOp {
    /// Returns the sources that are used.
    pub fn sources(&self) -> &[Addresses] {
        &self.from[..(self.sources as usize).min(PEERS_MAX)]
    }

    /// Returns the targets that are used.
    pub fn targets(&self) -> &[Addresses] {
        &self.to[..(self.targets as usize).min(PEERS_MAX)]
    }

    /// Returns the largest of 16, 4 and 1 that divides all addresses of the op except those of
    /// slots.
    fn alignment(&self) -> u64 {
        let is_slot = |index: usize| self.slots >> index & 1 == 1;
        let sources = (0..).zip(self.sources()).filter(|(index, _)| !is_slot(*index));
        let targets = (PEERS_MAX..).zip(self.targets()).filter(|(index, _)| !is_slot(*index));
        let bits =
            sources.chain(targets).flat_map(|(_, place)| place.0).fold(0, |all, one| all | one);
        [SLOT_WORD_BYTES, 4].into_iter().find(|align| bits.is_multiple_of(*align)).unwrap_or(1)
    }

    /// Returns whether the source of this index is a slot.
    pub fn is_slot_source(&self, index: usize) -> bool {
        self.slots >> index & 1 == 1
    }

    /// Returns whether the target of this index is a slot.
    pub fn is_slot_target(&self, index: usize) -> bool {
        self.slots >> (PEERS_MAX + index) & 1 == 1
    }
}

/// The compiled form of a start on one rank, as the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// The address of a [`Control`] in memory of the device.
    pub control: u64,
    /// The address of [`HostWords`] for the device, in memory of the host.
    pub host: u64,
    /// The value of flags before the first start.
    pub base: u64,
    /// The number of ops.
    pub ops: u32,
    /// The number by which a sum is divided.
    pub divisor: u32,
    /// The mask by which the kernel turns elements into those that it can compare.
    pub flip: u64,
    /// By how many bits the number of a start is shifted in the values of flags.
    pub shift: u32,
    /// What signals of the next start have in these low bits.
    pub digest: u32,
    /// The ops, in their order.
    pub op: [ProgramOp; OPS_MAX],
}

// Kernels take at most 4 KiB of parameters.
const _: () = assert!(size_of::<Program>() == 3504 && size_of::<ProgramOp>() == 288);

impl Program {
    /// Returns the ops that are used.
    pub fn ops(&self) -> &[ProgramOp] {
        &self.op[..(self.ops as usize).min(OPS_MAX)]
    }
}

/// The words of a program in memory of its device. They are 0 before the first start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// The number of the last start that has ended.
    pub start: u64,
    /// The number of blocks of the running launch that have ended.
    pub arrived: u32,
    /// 1 if a block has left because of an abort, so that later launches end at once.
    pub gone: u32,
}

/// The words of a program in memory of the host. They are 0 before the first start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostWords {
    /// 1 if blocks that wait must leave, and 0 otherwise.
    pub abort: u64,
    /// The number of the last start that has begun.
    pub begun: u64,
    /// The number of the last start that has ended.
    pub done: u64,
}
