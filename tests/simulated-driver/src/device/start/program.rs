//! Declares what the kernels of `backend-cuda/kernels/start.cu` take and keep in memory.

/// The largest number of entries of a list of an op.
pub(crate) const PEERS_MAX: usize = 8;
/// The largest number of ops of a program.
pub(crate) const OPS_MAX: usize = 12;

/// Bytes of data in a word of a slot, and those of the word.
pub(super) const DATA_BYTES: u64 = 8;
pub(super) const WORD_BYTES: u64 = 16;
/// A part of a block is a multiple of this many bytes.
const PART_UNIT: u64 = 16;

pub(super) const COPY: u32 = 0;
pub(super) const REDUCE: u32 = 1;
pub(super) const SYNC: u32 = 2;
pub(super) const MARK: u32 = 3;
pub(super) const LAST: u32 = 4;

/// The address of a place in even starts, and that in odd ones.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressPair([u64; 2]);

/// An op of a program.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(super) kind: u32,
    sources: u32,
    targets: u32,
    slots: u32,
    pub(super) bytes: u64,
    align: u64,
    from: [AddressPair; PEERS_MAX],
    to: [AddressPair; PEERS_MAX],
}

/// The parameter of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// The address of [`Control`].
    pub(super) control: u64,
    /// The address of [`HostWords`].
    pub(super) host: u64,
    pub(super) base: u64,
    ops: u32,
    pub(crate) divisor: u32,
    pub(crate) flip: u64,
    shift: u32,
    digest: u32,
    op: [Op; OPS_MAX],
}

/// The words of a program in memory of its device.
#[repr(C)]
pub(super) struct Control {
    pub(super) start: u64,
    pub(super) arrived: u32,
    pub(super) gone: u32,
}

/// The words of a program in memory of the host.
#[repr(C)]
pub(super) struct HostWords {
    pub(super) abort: u32,
    reserved: u32,
    pub(super) begun: u64,
    pub(super) done: u64,
}

const _: () = assert!(size_of::<Op>() == 288 && size_of::<Program>() == 3504);
const _: () = assert!(size_of::<Control>() == 16 && size_of::<HostWords>() == 24);

impl AddressPair {
    pub(super) fn address(self, start: u64) -> u64 {
        self.0[(start & 1) as usize]
    }

    pub(super) fn addresses(self) -> [u64; 2] {
        self.0
    }
}

impl Op {
    pub(super) fn sources(&self) -> &[AddressPair] {
        &self.from[..self.sources as usize]
    }

    pub(super) fn targets(&self) -> &[AddressPair] {
        &self.to[..self.targets as usize]
    }

    pub(super) fn is_slot_source(&self, index: usize) -> bool {
        self.slots >> index & 1 == 1
    }

    pub(super) fn is_slot_target(&self, index: usize) -> bool {
        self.slots >> (PEERS_MAX + index) & 1 == 1
    }

    pub(super) fn has_slots(&self) -> bool {
        self.slots != 0
    }

    pub(super) fn has_data(&self) -> bool {
        matches!(self.kind, COPY | REDUCE)
    }

    /// Returns every place with its number of bytes, if flags are those of so many blocks.
    pub(super) fn spans(&self, blocks: u32) -> impl Iterator<Item = (AddressPair, u64)> {
        let bytes = move |is_slot| match (self.has_data(), is_slot) {
            (false, _) => u64::from(blocks) * size_of::<u64>() as u64,
            (true, false) => self.bytes,
            (true, true) => self.bytes.div_ceil(DATA_BYTES) * WORD_BYTES,
        };
        let sources = self.sources().iter().enumerate();
        let sources =
            sources.map(move |(index, place)| (*place, bytes(self.is_slot_source(index))));
        let targets = self.targets().iter().enumerate();
        sources
            .chain(targets.map(move |(index, place)| (*place, bytes(self.is_slot_target(index)))))
    }

    /// Returns whether a kernel can run the op.
    fn is_valid(&self) -> bool {
        let (sources, targets) = (self.sources as usize, self.targets as usize);
        if sources > PEERS_MAX || targets > PEERS_MAX {
            return false;
        }

        let used = ((1 << sources) - 1) | (((1 << targets) - 1) << PEERS_MAX);
        let has_lists = match self.kind {
            COPY => targets > 0 && (sources == 1 || sources == targets),
            REDUCE => targets > 0 && sources > 0,
            SYNC => self.slots == 0,
            MARK => self.slots == 0 && sources == 0,
            LAST => self.slots == 0 && targets == 0,
            _ => false,
        };
        has_lists && self.slots & !used == 0 && (!self.has_data() || self.is_aligned())
    }

    fn is_aligned(&self) -> bool {
        let is_divided = |place: &AddressPair, is_slot: bool| {
            let align = if is_slot { WORD_BYTES } else { self.align };
            place.0.iter().all(|address| address.is_multiple_of(align))
        };
        let mut sources = self.sources().iter().enumerate();
        let mut targets = self.targets().iter().enumerate();
        matches!(self.align, 16 | 4 | 1)
            && sources.all(|(index, place)| is_divided(place, self.is_slot_source(index)))
            && targets.all(|(index, place)| is_divided(place, self.is_slot_target(index)))
    }
}

impl Program {
    pub(crate) fn ops(&self) -> &[Op] {
        &self.op[..self.ops as usize]
    }

    /// Returns the number of sources of the first reduction; 0 if there is none.
    pub(crate) fn contributions(&self) -> usize {
        let mut reductions = self.ops().iter().filter(|op| op.kind == REDUCE);
        reductions.next().map_or(0, |op| op.sources as usize)
    }

    /// Returns whether a kernel can run the program, with a reduction or without one.
    pub(crate) fn is_valid(&self, reduces: bool) -> bool {
        let is_valid = |op: &Op| {
            let is_divided = self.divisor == 1 || op.sources == self.divisor;
            op.is_valid() && (op.kind != REDUCE || reduces && is_divided)
        };
        let is_digest = self.shift <= 24 && self.digest >> self.shift == 0;
        self.ops as usize <= OPS_MAX && is_digest && self.ops().iter().all(is_valid)
    }

    /// Returns the least value that flags have in a start, or 0 for the start before the first.
    pub(super) fn value(&self, start: u64) -> u64 {
        if start == 0 { 0 } else { self.base + (start << self.shift) }
    }

    /// Returns the value of signals in a start.
    pub(super) fn signalled(&self, start: u64) -> u64 {
        self.value(start) + u64::from(self.digest)
    }
}

/// Returns the bytes of a part, if so many blocks share `bytes` bytes.
pub(super) fn part_bytes(bytes: u64, blocks: u32) -> u64 {
    PART_UNIT * bytes.div_ceil(PART_UNIT).div_ceil(u64::from(blocks))
}
