//! Provides ranks that make fused starts of one collective, with the ops of its direct plan.

use std::time::{Duration, Instant};

use peerlane_cuda::{Engine, Error, Fabric, Local, Remote};
use peerlane_hal::{
    At, CopyEngine as _, DType, EngineRequirements, Fabric as _, Flag, FusedOps, FusedProgress,
    Launch, Op, Operator, PeerMemory as _, Rank, Reduction, Role, SLOT_FACTOR, Ticket,
};

use crate::support::{ranks, soon};

pub(super) type OpOf<'a> = Op<'a, Local, Remote>;

/// How long a start may take that must end.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// The byte in outputs before a start.
const UNWRITTEN: u8 = 0xee;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collective {
    GatherTagged,
    GatherDirect,
    ReduceTagged,
    ReduceDirect,
    ReduceInParts,
    /// Rank 0 sends its input to all others, which tell it when they have begun a start.
    BroadcastTagged,
}

pub(super) const COLLECTIVES: [Collective; 6] = [
    Collective::GatherTagged,
    Collective::GatherDirect,
    Collective::ReduceTagged,
    Collective::ReduceDirect,
    Collective::ReduceInParts,
    Collective::BroadcastTagged,
];

impl Collective {
    pub(super) fn is_tagged(self) -> bool {
        matches!(self, Self::GatherTagged | Self::ReduceTagged | Self::BroadcastTagged)
    }

    pub(super) fn reduces(self) -> bool {
        matches!(self, Self::ReduceTagged | Self::ReduceDirect | Self::ReduceInParts)
    }

    /// Returns whether all ranks have the input of one in their output.
    fn has_one_input(self) -> bool {
        self == Self::BroadcastTagged
    }
}

/// What all ranks do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) collective: Collective,
    pub(super) ranks: usize,
    /// The length of an input.
    pub(super) bytes: u64,
    pub(super) blocks: u32,
    pub(super) base: u64,
    pub(super) operator: Operator,
    pub(super) dtype: DType,
}

impl Case {
    pub(super) fn new(collective: Collective, ranks: usize, bytes: u64, blocks: u32) -> Self {
        let dtype = match bytes {
            bytes if bytes.is_multiple_of(16) => DType::Bf16,
            bytes if bytes.is_multiple_of(8) => DType::F32,
            _ => DType::U8,
        };
        let operator = Operator::Sum;
        Self { collective, ranks, bytes, blocks, base: 0, operator, dtype }
    }

    pub(super) fn reduction(&self) -> Reduction {
        Reduction::new(self.operator, self.dtype).unwrap()
    }

    fn output_bytes(&self) -> u64 {
        let is_one = self.collective.reduces() || self.collective.has_one_input();
        self.bytes * if is_one { 1 } else { self.ranks as u64 }
    }

    /// Returns the bytes of a place in the inbox of a rank.
    fn place_bytes(&self) -> u64 {
        let factor = if self.collective.is_tagged() { SLOT_FACTOR } else { 1 };
        (factor * self.bytes).next_multiple_of(16)
    }

    /// Returns the place of a rank's data in the inbox of another.
    pub(super) fn inbox(&self, from: usize, parity: u64) -> u64 {
        (parity * self.ranks as u64 + from as u64) * self.place_bytes()
    }

    pub(super) fn inbox_bytes(&self) -> u64 {
        self.inbox(0, 2)
    }

    /// Returns the first word of a flag that a rank signals. Two sets of flags alternate.
    fn flag(&self, set: u64, from: usize, parity: u64) -> u64 {
        let flag = (2 * set + parity) * self.ranks as u64 + from as u64;
        flag * u64::from(self.blocks)
    }

    /// Returns the value of flags in the first even or the first odd start.
    fn first_value(&self, parity: u64) -> u64 {
        self.base + 2 - parity
    }

    /// Returns the first of the two words that count the starts.
    pub(super) fn counter_word(&self) -> u64 {
        self.flag(2, 0, 0)
    }

    pub(super) fn flag_bytes(&self) -> u64 {
        8 * (self.counter_word() + 2)
    }

    /// Returns the bytes that a rank reduces of those of all.
    fn part(&self, rank: usize) -> std::ops::Range<u64> {
        let unit = 16;
        let part = self.bytes.div_ceil(unit).div_ceil(self.ranks as u64) * unit;
        let first = (rank as u64 * part).min(self.bytes);
        first..(first + part).min(self.bytes)
    }

    /// Returns the input of a rank in a round.
    pub(super) fn input(&self, rank: usize, round: usize) -> Vec<u8> {
        let mixed = |index: usize| {
            let word = (index as u64) << 20 | (rank as u64) << 12 | round as u64;
            let word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
        };
        let count = self.bytes as usize / self.dtype.bytes();
        // Sums of such numbers depend on the order of the terms.
        let float = |index: usize| {
            let scale = [1.0, 4096.0, 0.001][(index + rank) % 3];
            ((mixed(index) % 8192) as f32 - 4096.5) * scale
        };
        let floats = (0..count).map(float);
        match self.dtype {
            _ if !self.collective.reduces() => {
                (0..self.bytes as usize).map(|index| mixed(index) as u8).collect()
            }
            DType::F32 => floats.flat_map(f32::to_le_bytes).collect(),
            DType::F64 => floats.map(f64::from).flat_map(f64::to_le_bytes).collect(),
            DType::Bf16 => {
                floats.flat_map(|it| ((it.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            // The sign and the low bits of the exponent, so that all numbers are finite.
            DType::F16 => {
                let bits = |index: usize| mixed(index) as u16 & 0xbbff;
                (0..count).flat_map(|index| bits(index).to_le_bytes()).collect()
            }
            _ => (0..self.bytes as usize).map(|index| mixed(index) as u8).collect(),
        }
    }

    /// Returns the output of every rank in a round.
    pub(super) fn expected(&self, round: usize) -> Vec<u8> {
        let inputs: Vec<Vec<u8>> = (0..self.ranks).map(|rank| self.input(rank, round)).collect();
        if self.collective.has_one_input() {
            return inputs[0].clone();
        }
        if !self.collective.reduces() {
            return inputs.concat();
        }

        // Aligned to any type of elements.
        let words = self.bytes.div_ceil(8) as usize;
        let aligned = |bytes: &Vec<u8>| -> Vec<u64> {
            let mut padded = bytes.clone();
            padded.resize(8 * words, 0);
            let words = padded.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            words.collect()
        };
        let inputs: Vec<Vec<u64>> = inputs.iter().map(aligned).collect();
        let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        let mut output = vec![0_u64; words];
        let bytes = self.bytes as usize;
        // SAFETY: all are locals of this length, aligned to words.
        unsafe { self.reduction().run(output.as_mut_ptr().cast(), &sources, bytes) };
        let mut output: Vec<u8> = output.iter().flat_map(|word| word.to_ne_bytes()).collect();
        output.truncate(bytes);
        output
    }
}

/// The memory of a rank, and what it has imported of all ranks.
pub(super) struct Regions {
    me: usize,
    pub(super) input: Local,
    pub(super) output: Local,
    pub(super) inbox: Local,
    pub(super) flags: Local,
    outputs: Vec<Remote>,
    pub(super) inboxes: Vec<Remote>,
    pub(super) peers_flags: Vec<Remote>,
}

pub(super) struct Member {
    // In the order in which they are dropped.
    pub(super) engine: Engine,
    pub(super) regions: Regions,
    pub(super) case: Case,
    /// The number of eager starts.
    pub(super) started: u64,
}

/// Returns fabrics that are connected, on devices from 0 on.
pub(super) fn fabrics(count: usize) -> Vec<Fabric> {
    ranks(count).unwrap()
}

/// Returns an engine that makes fused starts.
pub(super) fn engine(fabric: &Fabric, blocks: u32) -> Result<Engine, Error> {
    let requirements = EngineRequirements {
        kind: Some("kernels"),
        fused_blocks: blocks,
        ..EngineRequirements::default()
    };
    fabric.engine(requirements)
}

/// Returns the ranks of a case, with compiled ops.
pub(super) fn world(fabrics: &[Fabric], case: Case) -> Vec<Member> {
    let mut members = uncompiled(fabrics, case);
    members.iter_mut().for_each(|member| {
        let launch = member.compile().unwrap();
        assert_eq!(launch, Launch { blocks: case.blocks, threads: 512 });
    });
    members
}

/// Returns the ranks of a case, whose engines have compiled nothing.
pub(super) fn uncompiled(fabrics: &[Fabric], case: Case) -> Vec<Member> {
    let regions = |bytes: u64, role| -> Vec<Local> {
        let allocated = fabrics.iter().map(|it| it.memory().allocate(bytes, role).unwrap());
        allocated.collect()
    };
    let import = |me: &Fabric, regions: &[Local]| -> Vec<Remote> {
        let peers = Rank::all(case.ranks).zip(fabrics.iter().zip(regions));
        let imported = peers.map(|(peer, (owner, region))| {
            let key = owner.memory().export(region).unwrap();
            me.memory().import(peer, &key, soon()).unwrap()
        });
        imported.collect()
    };

    let inputs = regions(case.bytes, Role::Data);
    let outputs = regions(case.output_bytes(), Role::Data);
    let inboxes = regions(case.inbox_bytes(), Role::Data);
    let flags = regions(case.flag_bytes(), Role::Flags);
    let imports: Vec<_> = fabrics
        .iter()
        .map(|me| [import(me, &outputs), import(me, &inboxes), import(me, &flags)])
        .collect();

    let own = inputs.into_iter().zip(outputs).zip(inboxes).zip(flags).zip(imports);
    let members = fabrics.iter().zip(own).enumerate();
    members
        .map(|(me, (fabric, ((((input, output), inbox), flags), imports)))| {
            let mut engine = engine(fabric, case.blocks).unwrap();
            if case.collective.reduces() {
                engine.prepare_reduce().unwrap();
            }
            let [outputs, inboxes, peers_flags] = imports;
            let regions =
                Regions { me, input, output, inbox, flags, outputs, inboxes, peers_flags };
            Member { engine, regions, case, started: 0 }
        })
        .collect()
}

impl Regions {
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.outputs.len());
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    fn signals(&self, case: &Case, set: u64, parity: u64) -> Vec<OpOf<'_>> {
        let word = case.flag(set, self.me, parity);
        let flag = |peer: usize| Flag { region: &self.peers_flags[peer], word };
        let value = case.first_value(parity);
        self.peers().map(|peer| Op::Signal { flag: flag(peer), value }).collect()
    }

    fn waits(&self, case: &Case, set: u64, parity: u64) -> Vec<OpOf<'_>> {
        let flag = |peer: usize| Flag { region: &self.flags, word: case.flag(set, peer, parity) };
        let value = case.first_value(parity);
        let wait = |peer: usize| Op::Wait { flag: flag(peer), value, reset: false };
        self.peers().map(wait).collect()
    }

    /// Returns the waits of rank 0 until its peers have begun the start before.
    fn waits_for_last(&self, case: &Case, set: u64, parity: u64) -> Vec<OpOf<'_>> {
        let mut waits = self.waits(case, set, 1 - parity);
        for op in &mut waits {
            if let Op::Wait { value, .. } = op {
                *value = if parity == 1 { 0 } else { case.base + 1 };
            }
        }
        waits
    }

    fn to_output<'a>(
        &'a self,
        rank: usize,
        offset: u64,
        src: At<'a, Local>,
        bytes: u64,
    ) -> OpOf<'a> {
        Op::Put { dst: At { region: &self.outputs[rank], offset }, src, bytes }
    }

    /// Returns the contributions to bytes of the result, in the order of the ranks.
    pub(super) fn contributions(&self, case: &Case, parity: u64) -> Vec<At<'_, Local>> {
        let first = match case.collective {
            Collective::ReduceInParts => case.part(self.me).start,
            _ => 0,
        };
        let place = |rank: usize| match rank == self.me {
            true => At { region: &self.input, offset: first },
            false => At { region: &self.inbox, offset: case.inbox(rank, parity) },
        };
        (0..case.ranks).map(place).collect()
    }

    /// Returns the ops of a start.
    pub(super) fn ops<'a>(
        &'a self,
        case: &Case,
        parity: u64,
        contributions: &'a [At<'a, Local>],
    ) -> Vec<OpOf<'a>> {
        let Case { collective, bytes, .. } = *case;
        let input = At { region: &self.input, offset: 0 };
        let to_inbox = |peer: usize, from: u64, bytes: u64| Op::Put {
            dst: At { region: &self.inboxes[peer], offset: case.inbox(self.me, parity) },
            src: At { region: &self.input, offset: from },
            bytes,
        };
        let reduce = |bytes: u64, offset: u64| Op::Reduce {
            dst: At { region: &self.output, offset },
            srcs: contributions,
            bytes,
            reduction: case.reduction(),
        };

        let mut ops = Vec::new();
        match collective {
            Collective::GatherTagged => {
                ops.extend(self.peers().map(|peer| to_inbox(peer, 0, bytes)));
                ops.push(self.to_output(self.me, self.me as u64 * bytes, input, bytes));
                ops.extend(self.signals(case, 0, parity));
                ops.extend(self.waits(case, 0, parity));
                ops.extend(self.peers().map(|peer| {
                    let slot = At { region: &self.inbox, offset: case.inbox(peer, parity) };
                    self.to_output(self.me, peer as u64 * bytes, slot, bytes)
                }));
            }
            Collective::BroadcastTagged if self.me == 0 => {
                ops.extend(self.waits_for_last(case, 1, parity));
                ops.extend(self.peers().map(|peer| to_inbox(peer, 0, bytes)));
                ops.push(self.to_output(self.me, 0, input, bytes));
                ops.extend(self.signals(case, 0, parity));
            }
            Collective::BroadcastTagged => {
                let to_root = |op: &OpOf<'_>| match op {
                    Op::Signal { flag, .. } => std::ptr::eq(flag.region, &self.peers_flags[0]),
                    _ => false,
                };
                ops.extend(self.signals(case, 1, parity).into_iter().filter(to_root));
                // It hears only from rank 0.
                let flag = Flag { region: &self.flags, word: case.flag(0, 0, parity) };
                let value = case.first_value(parity);
                ops.push(Op::Wait { flag, value, reset: false });
                let slot = At { region: &self.inbox, offset: case.inbox(0, parity) };
                ops.push(self.to_output(self.me, 0, slot, bytes));
            }
            Collective::GatherDirect => {
                ops.extend(self.signals(case, 1, parity));
                ops.extend(self.waits(case, 1, parity));
                let all = [self.me].into_iter().chain(self.peers());
                ops.extend(
                    all.map(|rank| self.to_output(rank, self.me as u64 * bytes, input, bytes)),
                );
                ops.extend(self.signals(case, 0, parity));
                ops.extend(self.waits(case, 0, parity));
            }
            Collective::ReduceTagged | Collective::ReduceDirect => {
                ops.extend(self.peers().map(|peer| to_inbox(peer, 0, bytes)));
                ops.extend(self.signals(case, 0, parity));
                ops.extend(self.waits(case, 0, parity));
                ops.push(reduce(bytes, 0));
            }
            Collective::ReduceInParts => {
                let parts = self.peers().map(|peer| (peer, case.part(peer)));
                ops.extend(
                    parts.map(|(peer, part)| to_inbox(peer, part.start, part.end - part.start)),
                );
                ops.extend(self.signals(case, 0, parity));
                ops.extend(self.waits(case, 0, parity));

                let part = case.part(self.me);
                let (first, bytes) = (part.start, part.end - part.start);
                ops.push(reduce(bytes, first));
                let sum = At { region: &self.output, offset: first };
                ops.extend(self.peers().map(|peer| self.to_output(peer, first, sum, bytes)));
                ops.extend(self.signals(case, 1, parity));
                ops.extend(self.waits(case, 1, parity));
            }
        }
        ops
    }
}

impl Member {
    pub(super) fn compile(&mut self) -> Result<Launch, Error> {
        let Self { engine, regions, case, .. } = self;
        // A run may have the flags that others left behind.
        let zeros = vec![0; case.flag_bytes() as usize];
        // SAFETY: nobody has started yet.
        unsafe { regions.flags.upload(0, &zeros) }?;

        let sources = [0, 1].map(|parity| regions.contributions(case, parity));
        let [even, odd] = [0, 1].map(|parity| regions.ops(case, parity, &sources[parity as usize]));
        let slots = case
            .collective
            .is_tagged()
            .then(|| (At { region: &regions.inbox, offset: 0 }, case.inbox_bytes()));
        let (blocks, base) = (case.blocks, case.base);
        let counter = Flag { region: &regions.flags, word: case.counter_word() };
        let ops = FusedOps { ops: [&even, &odd], slots, counter, blocks, base, digest_bits: 0 };
        engine.fused().unwrap().compile(&ops)
    }

    /// Returns how far the starts have come.
    pub(super) fn progress(&mut self) -> FusedProgress {
        (self.engine.fused().unwrap().progress().unwrap())()
    }

    /// Sets the input of a round, and makes the output a pattern that no round has.
    pub(super) fn prepare(&self, round: usize) {
        let input = self.case.input(self.regions.me, round);
        // SAFETY: no start of this rank runs, and peers write the output only behind its signal.
        unsafe { self.regions.input.upload(0, &input) }.unwrap();
        let output = vec![UNWRITTEN; self.case.output_bytes() as usize];
        // SAFETY: as above.
        unsafe { self.regions.output.upload(0, &output) }.unwrap();
    }

    pub(super) fn start(&mut self) -> Ticket {
        // SAFETY: the regions live as long as the engine, which is dropped first. Tests access them
        // only behind the ticket.
        let ticket = unsafe { self.engine.fused().unwrap().start(0, 0) }.unwrap();
        self.started = ticket.0;
        ticket
    }

    pub(super) fn is_done(&mut self, ticket: Ticket) -> bool {
        self.engine.completed().unwrap() >= ticket
    }

    /// Returns whether the ticket is complete within this time.
    pub(super) fn ends_within(&mut self, ticket: Ticket, patience: Duration) -> bool {
        let start = Instant::now();
        while !self.is_done(ticket) {
            if start.elapsed() > patience {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Returns the place of the first byte of the output that is wrong.
    pub(super) fn wrong_byte(&self, expected: &[u8]) -> Option<usize> {
        let mut output = vec![0; expected.len()];
        // SAFETY: no start of this rank runs.
        unsafe { self.regions.output.download(0, &mut output) }.unwrap();
        output.iter().zip(expected).position(|(byte, expected)| byte != expected)
    }

    /// Lets the starts end, whatever they wait for.
    pub(super) fn release_all(&mut self, last: Ticket) -> bool {
        let start = Instant::now();
        loop {
            self.engine.release().unwrap();
            if self.engine.completed().unwrap() >= last {
                return true;
            }
            if start.elapsed() > PATIENCE {
                return false;
            }
            std::thread::yield_now();
        }
    }
}
