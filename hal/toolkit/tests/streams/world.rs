//! Ranks of one process that run an all-gather by hand, with the ops of the direct plan.

use std::time::{Duration, Instant};

use peerlane_hal::{
    At, CopyEngine as _, Fabric as _, Flag, Op, PeerMemory as _, Rank, Region as _, Role, Ticket,
};

use crate::backend::{
    Engine, Error, Fabric, Local, Options, Remote, SignalBy, connected, pattern, soon,
};

pub(crate) type OpOf<'a> = Op<'a, Local, Remote>;

/// Options of an all-gather.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherOptions {
    pub(crate) ready: bool,
    pub(crate) in_place: bool,
    /// Whether flags have two states, for graphs.
    pub(crate) captured: bool,
}

pub(crate) const PLAIN: GatherOptions =
    GatherOptions { ready: true, in_place: false, captured: false };
pub(crate) const CAPTURED: GatherOptions = GatherOptions { captured: true, ..PLAIN };

/// One rank with its regions and imports.
pub(crate) struct Member {
    pub(crate) me: usize,
    // In the order in which they are dropped.
    pub(crate) engine: Engine,
    pub(crate) regions: Regions,
    fabric: Fabric,
}

pub(crate) struct Regions {
    pub(crate) source: Local,
    pub(crate) output: Local,
    pub(crate) flags: Local,
    outputs: Vec<Remote>,
    peers_flags: Vec<Remote>,
    shard: u64,
}

/// Opens `count` ranks, each on the device with its number.
pub(crate) fn world(count: usize, shard: u64, signal: Option<SignalBy>) -> Vec<Member> {
    world_on(0, count, shard, signal)
}

/// Opens `count` ranks on the devices from `first` on.
pub(crate) fn world_on(
    first: u32,
    count: usize,
    shard: u64,
    signal: Option<SignalBy>,
) -> Vec<Member> {
    let open = |rank: Rank| {
        let options = Options { device: first + rank.0, signal, ..Options::default() };
        Fabric::open_with(rank, count, options)
    };
    let fabrics = connected(count, soon, open).unwrap();
    let regions = |bytes, role| -> Vec<Local> {
        fabrics.iter().map(|fabric| fabric.memory().allocate(bytes, role).unwrap()).collect()
    };
    let sources = regions(shard, Role::Data);
    let outputs = regions(shard * count as u64, Role::Data);
    let flags = regions(4 * 8 * count as u64, Role::Flags);
    let import = |me: &Fabric, regions: &[Local]| -> Vec<Remote> {
        let peers = Rank::all(count).zip(fabrics.iter().zip(regions));
        peers
            .map(|(peer, (owner, region))| {
                let key = owner.memory().export(region).unwrap();
                me.memory().import(peer, &key, soon()).unwrap()
            })
            .collect()
    };
    let reached: Vec<_> =
        fabrics.iter().map(|me| (import(me, &outputs), import(me, &flags))).collect();
    let members = fabrics.into_iter().zip(sources).zip(outputs).zip(flags).zip(reached).enumerate();
    members
        .map(|(me, ((((fabric, source), output), flags), (outputs, peers_flags)))| Member {
            me,
            engine: fabric.engine(Default::default()).unwrap(),
            regions: Regions { source, output, flags, outputs, peers_flags, shard },
            fabric,
        })
        .collect()
}

/// Returns the ops of one start.
fn gather(me: usize, regions: &Regions, epoch: u64, options: GatherOptions) -> Vec<OpOf<'_>> {
    let ranks = regions.outputs.len();
    let peers = || (1..ranks).map(|step| (me + step) % ranks);
    let value = if options.captured { 1 } else { epoch };
    // Graphs and eager starts use different flags.
    let base = if options.captured { 2 * ranks } else { 0 };
    let signal = |first: usize, peer: usize| {
        let flag = Flag { region: &regions.peers_flags[peer], word: (base + first + me) as u64 };
        Op::Signal { flag, value }
    };
    let wait = |first: usize, peer: usize| {
        let flag = Flag { region: &regions.flags, word: (base + first + peer) as u64 };
        Op::Wait { flag, value, reset: options.captured }
    };
    let (region, offset) = if options.in_place {
        (&regions.output, me as u64 * regions.shard)
    } else {
        (&regions.source, 0)
    };
    let put = |peer: usize| put(me, regions, (region, offset), peer);
    let mut ops = Vec::new();
    if options.ready {
        ops.extend(peers().map(|peer| signal(0, peer)));
        ops.extend(peers().map(|peer| wait(0, peer)));
    }
    if !options.in_place {
        ops.push(put(me));
    }
    ops.extend(peers().map(put));
    ops.extend(peers().map(|peer| signal(ranks, peer)));
    ops.extend(peers().map(|peer| wait(ranks, peer)));
    ops
}

fn put<'a>(
    me: usize,
    regions: &'a Regions,
    (region, offset): (&'a Local, u64),
    peer: usize,
) -> OpOf<'a> {
    let to = At { region: &regions.outputs[peer], offset: me as u64 * regions.shard };
    Op::Put { dst: to, src: At { region, offset }, bytes: regions.shard }
}

impl Member {
    pub(crate) fn submit(&mut self, epoch: u64, options: GatherOptions) -> Ticket {
        self.try_submit(epoch, options).unwrap()
    }

    pub(crate) fn try_submit(
        &mut self,
        epoch: u64,
        options: GatherOptions,
    ) -> Result<Ticket, Error> {
        let ops = gather(self.me, &self.regions, epoch, options);
        // SAFETY: the regions live as long as the engine, which is dropped first. Tests access them only
        // behind the ticket or the stream.
        unsafe { self.engine.submit(&ops) }
    }

    /// Submits puts of `early` to all ranks, and then an all-gather behind a wait that ends when the flag reaches
    /// `gate`. `early` must not change before the ticket is complete; the source may, until the gate is open.
    pub(crate) fn submit_held(&mut self, gate: u64, early: &Local) -> Ticket {
        let (regions, me) = (&self.regions, self.me);
        let ranks = regions.outputs.len();
        let mut ops: Vec<OpOf<'_>> =
            (0..ranks).map(|step| put(me, regions, (early, 0), (me + step) % ranks)).collect();
        let flag = Flag { region: &regions.flags, word: self.gate() };
        ops.push(Op::Wait { flag, value: gate, reset: false });
        ops.extend(gather(me, regions, gate, GatherOptions { ready: false, ..PLAIN }));
        // SAFETY: as in `try_submit`.
        unsafe { self.engine.submit(&ops) }.unwrap()
    }

    /// Returns a flag that no rank signals: that of this rank's readiness for itself.
    fn gate(&self) -> u64 {
        self.me as u64
    }

    pub(crate) fn open_gate(&self, gate: u64) {
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.regions.flags.upload(self.gate() * 8, &gate.to_ne_bytes()) }.unwrap();
    }

    /// Puts bytes to another rank, then the shard to `to` in quarters, then signals its arrival, and then
    /// continues.
    pub(crate) fn put_quarters_and_signal(&mut self, to: usize, value: u64) -> Ticket {
        let (regions, me) = (&self.regions, self.me);
        let ranks = regions.outputs.len();
        let mut ops = vec![put(me, regions, (&regions.source, 0), (to + 1) % ranks)];
        for offset in (0..4).map(|quarter| quarter * regions.shard / 4) {
            let dst =
                At { region: &regions.outputs[to], offset: me as u64 * regions.shard + offset };
            let src = At { region: &regions.source, offset };
            ops.push(Op::Put { dst, src, bytes: regions.shard / 4 });
        }
        let flag = Flag { region: &regions.peers_flags[to], word: (ranks + me) as u64 };
        ops.push(Op::Signal { flag, value });
        // The ops that follow send the signal before the slice ends.
        ops.push(ops[0]);
        // SAFETY: as in `try_submit`.
        unsafe { self.engine.submit(&ops) }.unwrap()
    }

    /// Gets the shard of every other rank from its output, and then signals each of them.
    pub(crate) fn pull_from_all(&mut self, value: u64) -> Ticket {
        let (regions, me) = (&self.regions, self.me);
        let ranks = regions.outputs.len();
        let peers = || (1..ranks).map(|step| (me + step) % ranks);
        let get = |peer: usize| {
            let offset = peer as u64 * regions.shard;
            let src = At { region: &regions.outputs[peer], offset };
            Op::Get { dst: At { region: &regions.output, offset }, src, bytes: regions.shard }
        };
        let taken = |peer: usize| {
            let flag = Flag { region: &regions.peers_flags[peer], word: (ranks + me) as u64 };
            Op::Signal { flag, value }
        };
        let ops: Vec<OpOf<'_>> = peers().map(get).chain(peers().map(taken)).collect();
        // SAFETY: as in `try_submit`.
        unsafe { self.engine.submit(&ops) }.unwrap()
    }

    /// Puts `count` rows from this rank's output into the output of the next rank, with the given strides.
    pub(crate) fn put_rows(&mut self, count: u64, bytes: u64, strides: (u64, u64)) -> Ticket {
        let (regions, next) = (&self.regions, (self.me + 1) % self.regions.outputs.len());
        let row = |row: u64| Op::Put {
            dst: At { region: &regions.outputs[next], offset: row * strides.0 },
            src: At { region: &regions.output, offset: row * strides.1 },
            bytes,
        };
        let ops: Vec<OpOf<'_>> = (0..count).map(row).collect();
        // SAFETY: as in `try_submit`.
        unsafe { self.engine.submit(&ops) }.unwrap()
    }

    /// Waits until another engine of this rank sees the value.
    pub(crate) fn reach(&mut self, word: u64, value: u64) {
        let mut engine = self.fabric.engine(Default::default()).unwrap();
        let flag = Flag { region: &self.regions.flags, word };
        // SAFETY: the flags outlive the engine.
        unsafe { engine.submit(&[Op::Wait { flag, value, reset: false }]) }.unwrap();
        let start = Instant::now();
        while engine.completed().unwrap() < Ticket(1) {
            assert!(start.elapsed() < Duration::from_secs(20), "rank {}: word {word}", self.me);
        }
    }

    /// Submits a wait for a flag of this rank.
    pub(crate) fn wait_for(&mut self, word: u64, value: u64) -> Ticket {
        let Self { engine, regions, .. } = self;
        let flag = Flag { region: &regions.flags, word };
        // SAFETY: the flags live as long as the member.
        unsafe { engine.submit(&[Op::Wait { flag, value, reset: false }]) }.unwrap()
    }

    pub(crate) fn finish(&mut self, ticket: Ticket) {
        let start = Instant::now();
        while self.engine.completed().unwrap() < ticket {
            assert!(start.elapsed() < Duration::from_secs(20), "rank {}: {ticket:?}", self.me);
            self.engine.park(Duration::from_millis(1)).unwrap();
        }
    }

    /// Allocates the source and the destination of a round.
    pub(crate) fn round(&self, seed: u8) -> (Local, Local) {
        let memory = self.fabric.memory();
        let sent = memory.allocate(self.regions.shard, Role::Data).unwrap();
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { sent.upload(0, &pattern(seed, self.regions.shard as usize)) }.unwrap();
        (sent, memory.allocate(self.regions.output.bytes(), Role::Data).unwrap())
    }

    pub(crate) fn fill(&self, seed: u8) {
        let bytes = pattern(seed, self.regions.shard as usize);
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.regions.source.upload(0, &bytes) }.unwrap();
    }

    pub(crate) fn ensure_gathered(&self, seed: impl Fn(usize) -> u8, what: &str) {
        let Regions { output, shard, .. } = &self.regions;
        ensure_gathered(output, seed, *shard, &format!("rank {}, {what}", self.me));
    }
}

pub(crate) fn ensure_gathered(region: &Local, seed: impl Fn(usize) -> u8, shard: u64, what: &str) {
    let mut seen = vec![0; region.bytes() as usize];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { region.download(0, &mut seen) }.unwrap();
    for (rank, seen) in seen.chunks(shard as usize).enumerate() {
        let wanted = pattern(seed(rank), seen.len());
        if seen != wanted {
            let wrong = seen.iter().zip(&wanted).position(|(seen, wanted)| seen != wanted);
            panic!("{what}: wrong byte {wrong:?} of the shard of rank {rank}");
        }
    }
}
