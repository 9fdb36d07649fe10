//! Draws a scenario from a seed.

use std::fmt;
use std::time::Duration;

use peerlane_collectives::element::DType;
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;
use peerlane_host as host;

use super::operation::Guarded;
use peerlane_conformance::middleware::DowngradeLayer;

/// Numbers of ranks: every small one, and two that exceed the cores of any test machine.
pub const RANKS: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16];
/// Bytes of a block: none, odd ones, and those around a page.
pub const BLOCK_BYTES: [usize; 6] = [0, 1, 3, 4095, 4096, 4097];

/// About how long the ops of one start are delayed on one rank, in total.
const DELAY_A_START: Duration = Duration::from_millis(4);

/// A phase of a start in which a rank can be slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before it prepares.
    Prepare,
    /// Before it fills its block.
    Fill,
    /// Before it starts.
    Start,
    /// Between its start and its first wait or poll.
    Drive,
    /// Between two polls.
    Poll,
    /// Between the end of a start and the check of its result.
    Read,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 6] =
        [Self::Prepare, Self::Fill, Self::Start, Self::Drive, Self::Poll, Self::Read];

    pub(super) fn pause(self) -> Duration {
        // Shorter for polls, because a start has many.
        Duration::from_micros(if self == Self::Poll { 200 } else { 3000 })
    }
}

/// Configures the engines of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Engine {
    /// Options of the host backend.
    pub options: host::Options,
    /// The longest delay of an op; `None` for no layer at all.
    pub delay: Option<Duration>,
    /// Abilities that a layer removes in addition to the delays.
    pub downgrade: DowngradeLayer,
}

/// Selects the element type of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Bytes.
    U8,
    /// Elements of 4 bytes.
    F32,
    /// Elements of 8 bytes.
    I64,
}

impl Elements {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::U8 => DType::U8,
            Self::F32 => DType::F32,
            Self::I64 => DType::I64,
        }
    }
}

/// Describes one run of a group: ranks, sizes, engines, and which rank is slow.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Seed from which data, delays and all other fields are drawn.
    pub seed: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Element type; a block is a whole number of elements.
    pub elements: Elements,
    /// Chunks of a block.
    pub chunks: u32,
    /// True if the blocks are in the output.
    pub in_place: bool,
    /// Outputs that are used in turn; `None` leaves the choice to the group.
    pub outputs: Option<u32>,
    /// Starts of every operation.
    pub starts: u64,
    /// Groups that exist at once.
    pub groups: usize,
    /// Operations of each group.
    pub operations: usize,
    /// True if all operations are started before any is waited for.
    pub overlap: bool,
    /// Starts after which all ranks meet at a barrier; `None` if only the all-gathers keep them in
    /// step.
    pub barrier_every: Option<u64>,
    /// True if each rank brings its own memory, each at another offset.
    pub own_memory: bool,
    /// The slow rank, and the phase in which it is slow.
    pub slow: Option<(Rank, Phase)>,
    /// Engines by rank; those of the local fabric if the scenario has a network.
    pub engines: Vec<Engine>,
    /// Algorithm of the all-gathers.
    pub algorithm: Algorithm,
    /// Which ranks share a node.
    pub topology: Topology,
    /// Engines of the network by rank, if the scenario has one.
    pub networks: Option<Vec<Engine>>,
}

impl Scenario {
    /// Returns the scenario with an algorithm that fits its topology, which is direct if its own
    /// does not.
    #[must_use]
    pub fn with_fitting_algorithm(self) -> Self {
        match self.fitting().contains(&self.algorithm) {
            true => self,
            false => Self { algorithm: Algorithm::Direct, ..self },
        }
    }

    /// Returns the algorithms that fit the topology.
    fn fitting(&self) -> Vec<Algorithm> {
        let shape = Shape { tiers: self.networks.is_some(), ..Shape::default() };
        schedule::fitting(&self.topology, shape).collect()
    }

    /// Draws the scenario of `seed`.
    ///
    /// The seeds below `RANKS.len() * BLOCK_BYTES.len()` cover every number of ranks with every
    /// number of bytes; so does each following block of as many seeds.
    pub fn draw(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let place = usize::try_from(seed % 1_000_000).expect("it is small");
        let ranks = RANKS[place % RANKS.len()];
        let block_bytes = BLOCK_BYTES[place / RANKS.len() % BLOCK_BYTES.len()];
        let chunks = random.u32(1..=3);
        let choices = [Elements::U8, Elements::U8, Elements::F32, Elements::I64];
        let fits = |elements: &Elements| block_bytes.is_multiple_of(elements.dtype().bytes());
        let elements = random.choice(choices).filter(fits).unwrap_or(Elements::U8);
        let slow = random.bool().then(|| {
            let rank = Rank::at(random.usize(..ranks));
            (rank, Phase::ALL[random.usize(..Phase::ALL.len())])
        });
        let (in_place, own_memory) = (random.bool(), random.u32(..3) == 0);
        let free = !in_place && !own_memory;
        let engines = |random: &mut fastrand::Rng| {
            (0..ranks).map(|_| Engine::draw(random, ranks, chunks, block_bytes)).collect()
        };
        let mut scenario = Self {
            seed,
            ranks,
            block_bytes,
            elements,
            chunks,
            in_place,
            outputs: Some(random.u32(1..=2)).filter(|_| free && random.bool()),
            starts: random.u64(10..14),
            groups: if random.u32(..4) == 0 { 2 } else { 1 },
            operations: if random.u32(..4) == 0 { 2 } else { 1 },
            overlap: random.bool(),
            barrier_every: (random.u32(..4) == 0).then(|| random.u64(1..5)),
            own_memory,
            slow,
            engines: engines(&mut random),
            algorithm: Algorithm::Direct,
            topology: Topology::flat(ranks).expect("there are some ranks"),
            networks: None,
        };
        // Drawn last, so that the other fields of a seed stay those that it had before there were nodes.
        if random.u32(..4) > 0 {
            scenario.topology = nodes(&mut random, ranks);
            scenario.networks = random.bool().then(|| engines(&mut random));
        }
        scenario.algorithm = random.choice(scenario.fitting()).expect("there are some");
        scenario
    }

    /// Returns the generator of the random choices that `rank` makes during the run.
    pub(super) fn random(&self, rank: Rank) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed ^ (u64::from(rank.0) + 1) << 40)
    }

    /// Returns an input and an output for each operation, if the ranks bring their own.
    pub(super) fn own_memory(&self, rank: Rank) -> Vec<Guarded> {
        let mut random = self.random(rank);
        let operations = if self.own_memory { self.groups * self.operations } else { 0 };
        let mut offset = || random.usize(..64) * self.elements.dtype().bytes();
        let bytes = [self.block_bytes, self.block_bytes * self.ranks];
        (0..operations).flat_map(|_| bytes).map(|bytes| Guarded::new(bytes, offset())).collect()
    }
}

/// Draws up to four nodes of different sizes, whose ranks need not be consecutive.
fn nodes(random: &mut fastrand::Rng, ranks: usize) -> Topology {
    let drawn: Vec<u32> = (0..ranks).map(|_| random.u32(..4)).collect();
    let members: Vec<Vec<Rank>> = (0..4)
        .map(|node| Rank::all(ranks).filter(|rank| drawn[rank.index()] == node).collect())
        .filter(|members: &Vec<Rank>| !members.is_empty())
        .collect();
    Topology::from_members(&members).expect("every rank is on one node")
}

impl Engine {
    /// Creates the configuration of an unchanged backend.
    pub fn plain() -> Self {
        let (options, downgrade) = (host::Options::default(), DowngradeLayer::default());
        Self { options, delay: None, downgrade }
    }

    fn draw(random: &mut fastrand::Rng, ranks: usize, chunks: u32, block_bytes: usize) -> Self {
        let mut engine = Self::plain();
        if random.u32(..8) == 0 {
            return engine;
        }
        let delayed = random.bool();
        let slices = [1, 2, 3, 1024];
        let slice = slices[random.usize(..slices.len())];
        let queued_wait = random.u32(..3) > 0;
        let options = &mut engine.options;
        options.spin =
            [None, Some(Duration::ZERO), Some(Duration::from_micros(20))][random.usize(..3)];
        options.caps.piece_bytes_max = [7, 64, u64::MAX][random.usize(..3)];
        let around = block_bytes as u64 + random.u64(..3);
        options.streaming_bytes_min =
            [None, Some(1), Some(around.saturating_sub(1))][random.usize(..3)];
        if !delayed {
            options.caps.queued_wait = queued_wait;
            options.caps.slice_ops_max = slice;
            options.queue_ops = slice + random.usize(..4);
            return engine;
        }
        // The delay layer needs an engine with all abilities, so they are removed above it.
        let ops = (4 * chunks as usize + 2) * ranks;
        engine.delay = Some(DELAY_A_START * 4 / u32::try_from(ops).expect("plans are short"));
        engine.downgrade =
            DowngradeLayer { queued_wait, slice_ops_max: slice, ..DowngradeLayer::default() };
        engine
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, ranks, block_bytes, chunks, in_place, outputs, starts, .. } = self;
        let dtype = self.elements.dtype();
        write!(
            f,
            "SEED={seed}: {ranks} ranks, {block_bytes} bytes of {dtype} in {chunks} chunk(s), "
        )?;
        write!(f, "in place: {in_place}, outputs: {outputs:?}, {starts} starts, ")?;
        let Self { groups, operations, overlap, barrier_every, own_memory, slow, .. } = self;
        write!(f, "{groups} group(s) of {operations} operation(s), overlap: {overlap}, ")?;
        write!(f, "barrier every {barrier_every:?}, own memory: {own_memory}, slow: {slow:?}")?;
        write!(f, ", {} on nodes {}", self.algorithm, self.topology.notation())?;
        for (what, engines) in
            [("engines", Some(&self.engines)), ("network", self.networks.as_ref())]
        {
            for (rank, engine) in Rank::all(*ranks).zip(engines.into_iter().flatten()) {
                write!(f, "\n  {what} of rank {rank}: {engine}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, delay, downgrade } = self;
        let host::Options { caps, queue_ops, spin, bind, streaming_bytes_min } = options;
        let queued_wait = caps.queued_wait && downgrade.queued_wait;
        let slice_ops_max = caps.slice_ops_max.min(downgrade.slice_ops_max);
        write!(f, "delay {delay:?}, queued waits: {queued_wait}, slices of {slice_ops_max}, ")?;
        write!(
            f,
            "queue of {queue_ops}, pieces of {}, spin {spin:?}, {bind:?}, ",
            caps.piece_bytes_max
        )?;
        write!(f, "streaming from {streaming_bytes_min:?}")
    }
}
