//! Measures the hierarchical all-gather beside one in two phases, start by start: `cargo xtask bench
//! hierarchical` runs this and records it.
//!
//! 8 ranks on 2 virtual nodes, threads of one process, with throttled engines. In two phases the ranks of
//! a rail gather between the nodes first, into the block of a rank in its node's output; then each node
//! gathers these blocks in place. Neighbours in rank order are on different nodes, so that both end with
//! the same bytes at the same places, and no byte is copied beside. All work on one output a rank.
//! Prints a line of JSON: medians of the iterations, of the slowest rank of each.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Parser;
use peerlane::bootstrap::Bootstrap;
use peerlane::bootstrap::in_process::{self, InProcess};
use peerlane::plan::Algorithm;
use peerlane::topology::Topology;
use peerlane::{AllGather, Error, Group, GroupOptions, host};
use peerlane_layers::{ThrottleLayer, Wrapped};

const NODES: usize = 2;
const NODE_RANKS: usize = 4;
const RANKS: usize = NODES * NODE_RANKS;
/// What no rank sends.
const POISON: u8 = 0xff;

#[derive(Parser, Clone, Copy, Debug)]
struct Options {
    /// The shard of a rank
    #[arg(long)]
    shard_bytes: usize,
    /// Parts of a shard
    #[arg(long)]
    parts: u32,
    /// What a rank sends between nodes at most
    #[arg(long)]
    network_bytes_per_second: f64,
    /// What a rank sends inside its node at most
    #[arg(long)]
    local_bytes_per_second: f64,
    /// How often everything is timed, in turns
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Between,
    Inside,
    TwoPhases,
    OnePart,
    Hierarchical,
}

impl Way {
    const ALL: [Self; 5] =
        [Self::Between, Self::Inside, Self::TwoPhases, Self::OnePart, Self::Hierarchical];

    fn name(self) -> &'static str {
        match self {
            Self::Between => "between_us",
            Self::Inside => "inside_us",
            Self::TwoPhases => "two_phases_us",
            Self::OnePart => "one_part_us",
            Self::Hierarchical => "hierarchical_us",
        }
    }

    fn is_whole(self) -> bool {
        !matches!(self, Self::Between | Self::Inside)
    }
}

type Fabric = Wrapped<host::Fabric, ThrottleLayer>;

/// The smaller groups that a rank is in.
struct Seats {
    rail: InProcess,
    node: InProcess,
}

struct Rank<'a> {
    options: &'a Options,
    number: usize,
    between: AllGather<u8>,
    inside: AllGather<u8>,
    one_part: AllGather<u8>,
    hierarchical: AllGather<u8>,
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    let mut rails = groups(NODE_RANKS, NODES)?;
    let mut nodes = groups(NODES, NODE_RANKS)?;
    let seats: Vec<_> = (0..RANKS)
        .map(|rank| {
            let (rail, node) = (&mut rails[rank / NODES], &mut nodes[rank % NODES]);
            Mutex::new(rail.next().zip(node.next()).map(|(rail, node)| Seats { rail, node }))
        })
        .collect();
    let times = in_process::run(RANKS, |whole| {
        let seat = &seats[whole.rank().index()];
        let seats = seat.lock().ok().and_then(|mut seats| seats.take());
        measure(&options, whole, seats.expect("each rank takes its seats once"))
    })?;
    let fields = Way::ALL.iter().enumerate().map(|(index, way)| {
        let starts = (0..options.iterations as usize)
            .map(|start| times.iter().map(|rank| rank[index][start]).max().unwrap_or_default());
        (way.name().to_owned(), median_us(starts.collect()).into())
    });
    println!("{}", serde_json::Value::Object(fields.collect()));
    Ok(())
}

/// The handles of `count` groups, in rank order.
fn groups(count: usize, ranks: usize) -> Result<Vec<std::vec::IntoIter<InProcess>>, Error> {
    (0..count).map(|_| Ok(in_process::group(ranks)?.into_iter())).collect()
}

/// The middle of the times, the mean of the two middle ones if their number is even.
fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let last = times.len() - 1;
    (times[last / 2] + times[last.div_ceil(2)]).as_secs_f64() / 2.0 * 1e6
}

/// As one rank: the time of every start of every way.
fn measure(options: &Options, whole: InProcess, seats: Seats) -> Result<Vec<Vec<Duration>>, Error> {
    let number = whole.rank().index();
    let slow = |bytes_per_second| ThrottleLayer { bytes_per_second, delay: Duration::ZERO };
    let near = slow(options.local_bytes_per_second);
    let far = slow(options.network_bytes_per_second);
    let open = |bootstrap: &InProcess| host::Fabric::open(bootstrap.rank(), bootstrap.ranks());
    let nodes: Vec<u32> = (0..NODES as u32).cycle().take(RANKS).collect();
    let local = open(&whole)?;
    let network = Wrapped::new(local.beside(host::Options::default())?, far);
    let whole_options = GroupOptions::default().topology(Topology::of_nodes(&nodes)?);
    let mut whole = whole_options.open_tiers(whole, Wrapped::new(local, near), network)?;
    let rail = Wrapped::new(open(&seats.rail)?, far);
    let mut rail = Group::open(seats.rail, rail)?;
    let node = Wrapped::new(open(&seats.node)?, near);
    let mut node = Group::open(seats.node, node)?;

    let (shard, block) = (options.shard_bytes, NODES * options.shard_bytes);
    let output = node.allocate::<u8>(RANKS * shard)?;
    let all = output.place().base;
    let own_block = all.as_ptr().wrapping_add(number / NODES * block);
    let own_block = NonNull::new(own_block).expect("a block inside of a buffer");
    let inside = node.all_gather(block).in_place().algorithm(Algorithm::Direct).parts(1);
    let inside = inside.output(output).prepare()?;
    // SAFETY: the memory is that of `inside`, which outlives all groups here but its own. Of the
    // operations over it only one runs at a time, as all ranks meet before each.
    let output = unsafe { rail.register_at::<u8>(own_block, block) }?;
    let between = rail.all_gather(shard).in_place().algorithm(Algorithm::Direct).parts(1);
    let between = between.output(output).prepare()?;
    let mut hierarchical = |parts| {
        // SAFETY: as above.
        let output = unsafe { whole.register_at::<u8>(all, RANKS * shard) }?;
        let gather = whole.all_gather(shard).in_place().algorithm(Algorithm::Hierarchical);
        gather.parts(parts).output(output).prepare()
    };
    let (one_part, hierarchical) = (hierarchical(1)?, hierarchical(options.parts)?);
    let mut rank = Rank { options, number, between, inside, one_part, hierarchical };
    let times = rank.time(&mut whole)?;

    let Rank { between, inside, one_part, hierarchical, .. } = rank;
    drop((between, one_part, hierarchical));
    rail.close()?;
    whole.close()?;
    drop(inside);
    node.close()?;
    Ok(times)
}

impl Rank<'_> {
    /// Times every way in turn; the turns before and after are checked instead.
    fn time(&mut self, whole: &mut Group<Fabric>) -> Result<Vec<Vec<Duration>>, Error> {
        let mut times = vec![Vec::new(); Way::ALL.len()];
        let last = self.options.iterations + 1;
        for turn in 0..=last {
            let checked = turn == 0 || turn == last;
            for (way, times) in Way::ALL.into_iter().zip(&mut times) {
                if checked {
                    self.poison()?;
                }
                whole.barrier()?;
                let begin = Instant::now();
                self.start(way)?;
                let elapsed = begin.elapsed();
                if !checked {
                    times.push(elapsed);
                } else if way.is_whole() {
                    self.check(way)?;
                }
                // Nobody poisons what another one still reads.
                whole.barrier()?;
            }
        }
        Ok(times)
    }

    fn start(&mut self, way: Way) -> Result<(), Error> {
        match way {
            Way::Between => self.between.run(),
            Way::Inside => self.inside.run(),
            Way::TwoPhases => self.between.run().and_then(|()| self.inside.run()),
            Way::OnePart => self.one_part.run(),
            Way::Hierarchical => self.hierarchical.run(),
        }
    }

    fn poison(&mut self) -> Result<(), Error> {
        let (shard, number) = (self.options.shard_bytes, self.number);
        let output = self.inside.output_mut()?;
        output.fill(POISON);
        fill(&mut output[number * shard..][..shard], number);
        Ok(())
    }

    fn check(&mut self, way: Way) -> Result<(), Error> {
        let shards = self.inside.output()?.chunks(self.options.shard_bytes).enumerate();
        for (from, shard) in shards {
            let wrong = shard.iter().enumerate().find(|&(at, byte)| *byte != content(from, at));
            if let Some((at, byte)) = wrong {
                let (rank, wanted) = (self.number, content(from, at));
                panic!("{way:?}: rank {rank} has {byte} at {at} of shard {from}, wanted {wanted}");
            }
        }
        Ok(())
    }
}

fn fill(shard: &mut [u8], rank: usize) {
    shard.iter_mut().enumerate().for_each(|(at, byte)| *byte = content(rank, at));
}

/// Below [`POISON`], and of another rhythm than any power of two.
fn content(rank: usize, at: usize) -> u8 {
    ((rank * 29 + at) % 251) as u8
}
