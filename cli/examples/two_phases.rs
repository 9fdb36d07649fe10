//! Measures the hierarchical all-gather against an all-gather in two phases. `cargo xtask bench
//! hierarchical` runs this and records it.
//!
//! There are 8 ranks on 2 virtual nodes, as threads of one process, with throttled engines. In two
//! phases, the ranks of a rail first gather between the nodes, into the block of a rank in its
//! node's output. Then each node gathers these blocks in place. Neighbours in rank order are on
//! different nodes, so both ways end with the same bytes at the same offsets, and no additional
//! copy is needed. All operations of a rank use one output. The program prints one line of JSON
//! with the medians of the iterations; the slowest rank counts in each iteration.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Parser;
use peerlane::Algorithm;
use peerlane::bootstrap::Bootstrap;
use peerlane::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane::topology::Topology;
use peerlane::{Error, Group, GroupOptions, Operation, host};
use peerlane_layers::{ThrottleLayer, Wrapped};

const NODES: usize = 2;
const NODE_RANKS: usize = 4;
const RANKS: usize = NODES * NODE_RANKS;
/// A byte that no rank sends, so that it marks bytes that were not written.
const POISON: u8 = 0xff;

#[derive(Parser, Clone, Copy, Debug)]
struct Options {
    /// Set the length of each rank's block in bytes
    #[arg(long)]
    block_bytes: usize,
    /// Set the number of chunks of each block
    #[arg(long)]
    chunks: u32,
    /// Limit the bytes per second that a rank sends between nodes
    #[arg(long)]
    network_bytes_per_second: f64,
    /// Limit the bytes per second that a rank sends inside its node
    #[arg(long)]
    local_bytes_per_second: f64,
    /// Set the number of timed iterations
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Between,
    Inside,
    TwoPhases,
    OneChunk,
    Hierarchical,
}

impl Variant {
    const ALL: [Self; 5] =
        [Self::Between, Self::Inside, Self::TwoPhases, Self::OneChunk, Self::Hierarchical];

    fn name(self) -> &'static str {
        match self {
            Self::Between => "between_us",
            Self::Inside => "inside_us",
            Self::TwoPhases => "two_phases_us",
            Self::OneChunk => "one_chunk_us",
            Self::Hierarchical => "hierarchical_us",
        }
    }

    fn is_whole(self) -> bool {
        !matches!(self, Self::Between | Self::Inside)
    }
}

struct SubGroups {
    rail: InProcessBootstrap,
    node: InProcessBootstrap,
}

struct Rank<'a> {
    options: &'a Options,
    number: usize,
    between: Operation<u8>,
    inside: Operation<u8>,
    one_chunk: Operation<u8>,
    hierarchical: Operation<u8>,
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    let mut rails = groups(NODE_RANKS, NODES)?;
    let mut nodes = groups(NODES, NODE_RANKS)?;
    let sub_groups: Vec<_> = (0..RANKS)
        .map(|rank| {
            let (rail, node) = (&mut rails[rank / NODES], &mut nodes[rank % NODES]);
            Mutex::new(rail.next().zip(node.next()).map(|(rail, node)| SubGroups { rail, node }))
        })
        .collect();
    let times = in_process::run(RANKS, |whole| {
        let sub_group = &sub_groups[whole.rank().index()];
        let sub_groups = sub_group.lock().ok().and_then(|mut sub_groups| sub_groups.take());
        measure(&options, whole, sub_groups.expect("each rank takes its groups once"))
    })?;
    let fields = Variant::ALL.iter().enumerate().map(|(index, variant)| {
        let starts = (0..options.iterations as usize)
            .map(|start| times.iter().map(|rank| rank[index][start]).max().unwrap_or_default());
        (variant.name().to_owned(), median_us(starts.collect()).into())
    });
    println!("{}", serde_json::Value::Object(fields.collect()));
    Ok(())
}

fn groups(
    count: usize,
    ranks: usize,
) -> Result<Vec<std::vec::IntoIter<InProcessBootstrap>>, Error> {
    (0..count).map(|_| Ok(in_process::group(ranks)?.into_iter())).collect()
}

fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let last = times.len() - 1;
    (times[last / 2] + times[last.div_ceil(2)]).as_secs_f64() / 2.0 * 1e6
}

fn measure(
    options: &Options,
    whole: InProcessBootstrap,
    sub_groups: SubGroups,
) -> Result<Vec<Vec<Duration>>, Error> {
    let number = whole.rank().index();
    let slow = |bytes_per_second| ThrottleLayer { bytes_per_second, delay: Duration::ZERO };
    let local_throttle = slow(options.local_bytes_per_second);
    let network_throttle = slow(options.network_bytes_per_second);
    let open =
        |bootstrap: &InProcessBootstrap| host::Fabric::open(bootstrap.rank(), bootstrap.ranks());
    let nodes: Vec<u32> = (0..NODES as u32).cycle().take(RANKS).collect();
    let local = open(&whole)?;
    let network = Wrapped::new(local.second(host::Options::default())?, network_throttle);
    let whole_options = GroupOptions::default().topology(Topology::of_nodes(&nodes)?);
    let mut whole =
        whole_options.open_tiers(whole, Wrapped::new(local, local_throttle), network)?;
    let rail = Wrapped::new(open(&sub_groups.rail)?, network_throttle);
    let mut rail = Group::open(sub_groups.rail, rail)?;
    let node = Wrapped::new(open(&sub_groups.node)?, local_throttle);
    let mut node = Group::open(sub_groups.node, node)?;

    let (block, own_blocks) = (options.block_bytes, NODES * options.block_bytes);
    let output = node.allocate::<u8>(RANKS * block)?;
    let all = output.memory().base;
    let own_block = all.as_ptr().wrapping_add(number / NODES * own_blocks);
    let own_block = NonNull::new(own_block).expect("a block inside of a buffer");
    let inside = node.all_gather(own_blocks).in_place().algorithm(Algorithm::Direct).chunks(1);
    let inside = inside.output(output).prepare()?;
    // SAFETY: the memory belongs to `inside`, which outlives all other groups of this rank. Only one of
    // the operations on it runs at a time, because all ranks pass a barrier before each start.
    let output = unsafe { rail.register_at::<u8>(own_block, own_blocks) }?;
    let between = rail.all_gather(block).in_place().algorithm(Algorithm::Direct).chunks(1);
    let between = between.output(output).prepare()?;
    let mut hierarchical = |chunks| {
        // SAFETY: as for the rail group.
        let output = unsafe { whole.register_at::<u8>(all, RANKS * block) }?;
        let gather = whole.all_gather(block).in_place().algorithm(Algorithm::Hierarchical);
        gather.chunks(chunks).output(output).prepare()
    };
    let (one_chunk, hierarchical) = (hierarchical(1)?, hierarchical(options.chunks)?);
    let mut rank = Rank { options, number, between, inside, one_chunk, hierarchical };
    let times = rank.time(&mut whole)?;

    let Rank { between, inside, one_chunk, hierarchical, .. } = rank;
    drop((between, one_chunk, hierarchical));
    rail.close()?;
    whole.close()?;
    drop(inside);
    node.close()?;
    Ok(times)
}

impl Rank<'_> {
    /// Times every variant in turn; the first and the last iteration are checked instead of timed.
    fn time(&mut self, whole: &mut Group) -> Result<Vec<Vec<Duration>>, Error> {
        let mut times = vec![Vec::new(); Variant::ALL.len()];
        let last = self.options.iterations + 1;
        for iteration in 0..=last {
            let is_checked = iteration == 0 || iteration == last;
            for (variant, times) in Variant::ALL.into_iter().zip(&mut times) {
                if is_checked {
                    self.poison()?;
                }
                whole.barrier()?;
                let begin = Instant::now();
                self.start(variant)?;
                let elapsed = begin.elapsed();
                if !is_checked {
                    times.push(elapsed);
                } else if variant.is_whole() {
                    self.check(variant)?;
                }
                // The barrier keeps a rank from overwriting data that another rank still reads.
                whole.barrier()?;
            }
        }
        Ok(times)
    }

    fn start(&mut self, variant: Variant) -> Result<(), Error> {
        match variant {
            Variant::Between => self.between.run(),
            Variant::Inside => self.inside.run(),
            Variant::TwoPhases => self.between.run().and_then(|()| self.inside.run()),
            Variant::OneChunk => self.one_chunk.run(),
            Variant::Hierarchical => self.hierarchical.run(),
        }
    }

    fn poison(&mut self) -> Result<(), Error> {
        let (block, number) = (self.options.block_bytes, self.number);
        let output = self.inside.output_mut()?;
        output.fill(POISON);
        fill(&mut output[number * block..][..block], number);
        Ok(())
    }

    fn check(&mut self, variant: Variant) -> Result<(), Error> {
        let blocks = self.inside.output()?.chunks(self.options.block_bytes).enumerate();
        for (from, block) in blocks {
            let wrong = block.iter().enumerate().find(|&(at, byte)| *byte != content(from, at));
            if let Some((at, byte)) = wrong {
                let (rank, expected) = (self.number, content(from, at));
                panic!(
                    "{variant:?}: rank {rank} has {byte} at offset {at} of block {from}, expected {expected}"
                );
            }
        }
        Ok(())
    }
}

fn fill(block: &mut [u8], rank: usize) {
    block.iter_mut().enumerate().for_each(|(at, byte)| *byte = content(rank, at));
}

/// Returns a test byte below [`POISON`], with a period that is not a power of two.
fn content(rank: usize, at: usize) -> u8 {
    ((rank * 29 + at) % 251) as u8
}
