//! Moves a rank to another core if the ranks are spread unevenly over the cores that it may use.
//!
//! The scheduler places a woken thread near the thread that woke it. So ranks that exchange
//! messages while they start often end on one core, and stay there: as long as one of them sleeps,
//! the scheduler sees nothing to balance. A rank that finds others on its core therefore moves to a
//! core with fewer ranks. Its affinity mask is the same before and after, so the scheduler can move
//! it again, and threads that it spawns inherit nothing.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::options::Bind;

/// The time from the first look at the cores to the second. A look takes a few microseconds.
const PAUSE_FIRST: Duration = Duration::from_micros(100);
/// The time between two looks that change nothing, as on a machine with more ranks than cores.
const PAUSE: Duration = Duration::from_millis(10);
/// The longest time between two looks, reached if the scheduler keeps moving the rank back.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// One core, which is a hardware thread of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Core {
    number: usize,
    /// The lowest hardware thread of the same physical core.
    physical: usize,
    /// The memory node.
    node: usize,
}

/// The cores and ranks among which a rank chooses its core.
#[derive(Debug)]
struct View {
    /// The cores that the rank may use.
    allowed: Vec<Core>,
    /// The cores on which the other ranks ran last, and whether each comes before this rank.
    others: Vec<(usize, bool)>,
    /// Cores that other processes use.
    slow: Vec<usize>,
}

/// Decides when a rank moves, and moves the calling thread.
#[derive(Debug)]
pub(crate) struct Mover {
    bind: Bind,
    next_look: Option<Instant>,
    pause: Duration,
    moves: u64,
    /// Buffers with capacity for all cores and ranks, so that a look at them allocates nothing.
    view: View,
}

impl Mover {
    pub(crate) fn new(bind: Bind, ranks: usize) -> Self {
        let view = View {
            allowed: Vec::with_capacity(machine().len()),
            others: Vec::with_capacity(ranks),
            slow: Vec::with_capacity(ranks),
        };
        Self { bind, next_look: None, pause: PAUSE_FIRST, moves: 0, view }
    }

    /// Returns how often a thread of the rank has moved.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// Binds the calling thread to one core permanently if `bind` is [`Bind::Core`]. `position` is
    /// the number of ranks of the machine that come before this one.
    pub(crate) fn bind(&self, position: usize) {
        if self.bind != Bind::Core {
            return;
        }

        let Ok(mask) = sched_getaffinity(None) else { return };
        let allowed = physical_first(&cores(&mask).collect::<Vec<_>>());
        if let Some(core) = allowed.get(position % allowed.len().max(1)) {
            // A thread that cannot be bound runs where the scheduler places it.
            let _ = sched_setaffinity(None, &set([core.number]));
        }
    }

    /// Moves the calling thread to a core with fewer ranks, or away from a core that another
    /// process uses. Returns whether the thread moved.
    ///
    /// `others` are the cores on which the other ranks ran last, and whether each comes before this
    /// rank; `slow` are cores that other processes use.
    pub(crate) fn spread(
        &mut self,
        here: u32,
        others: impl Iterator<Item = (u32, bool)>,
        slow: impl Iterator<Item = u32>,
    ) -> bool {
        if self.bind == Bind::None {
            return false;
        }
        let now = Instant::now();
        if self.next_look.is_some_and(|next| now < next) {
            return false;
        }

        let view = &mut self.view;
        view.others.clear();
        view.others.extend(others.map(|(core, is_before)| (core as usize, is_before)));
        view.slow.clear();
        view.slow.extend(slow.map(|core| core as usize));
        self.look(now, here as usize)
    }

    fn look(&mut self, now: Instant, here: usize) -> bool {
        let moved = self.move_from(here);
        let is_uneven = moved && !self.view.slow.contains(&here);
        self.pause = next_pause(self.pause, is_uneven);
        self.next_look = Some(now + self.pause);
        self.moves += u64::from(moved);
        moved
    }

    fn move_from(&mut self, here: usize) -> bool {
        let Ok(mask) = sched_getaffinity(None) else { return false };
        self.view.allowed.clear();
        self.view.allowed.extend(cores(&mask));
        let Some(better) = self.view.better_than(here) else { return false };

        // The thread runs on one of these cores when the first call returns, and the second call
        // leaves it there.
        let moved = sched_setaffinity(None, &better).is_ok();
        moved && sched_setaffinity(None, &mask).is_ok()
    }
}

/// Returns the time until the next look. It grows to the usual one while ranks start, and further
/// while the scheduler moves them back.
fn next_pause(pause: Duration, is_uneven: bool) -> Duration {
    match is_uneven {
        true => (pause * 2).clamp(PAUSE, PAUSE_MAX),
        false if pause > PAUSE => (pause / 2).max(PAUSE),
        false => (pause * 2).min(PAUSE),
    }
}

impl View {
    /// Returns the cores that are better for the rank than the one that it is on.
    ///
    /// If there are more ranks than cores, some share a core anyway, and sharing one with ranks is
    /// better than with another process: ranks yield to each other when they wait. Otherwise each
    /// rank has a core of its own, also a slow one.
    fn better_than(&self, here: usize) -> Option<CpuSet> {
        let Self { allowed, others, slow } = self;
        let own = allowed.iter().find(|core| core.number == here)?;
        let physical_of = |number: usize| {
            let core = allowed.iter().find(|core| core.number == number);
            core.map_or(number, |core| core.physical)
        };

        let shares = others.len() >= allowed.len();
        let cost = |core: &Core| {
            let on_core = others.iter().filter(|(number, _)| *number == core.number).count();
            let on_physical =
                others.iter().filter(|(number, _)| physical_of(*number) == core.physical).count();
            let is_slow = slow.contains(&core.number);
            let cost = [usize::from(is_slow && shares), on_core, usize::from(is_slow)];
            (cost, on_physical, usize::from(core.node != own.node))
        };
        let best = allowed.iter().map(cost).min()?;

        // Ranks on two hardware threads of a core look at the same time. The first one stays, or
        // both would move to the same free core. Memory of another node costs more than a shared
        // physical core.
        let (own_cost, on_physical, _) = cost(own);
        let mut before = others.iter().filter(|(_, is_before)| *is_before);
        let is_second = before.any(|(number, _)| physical_of(*number) == own.physical);
        let has_free_physical = best.0 == own_cost && best.1 < on_physical && best.2 == 0;
        let is_better = best.0 < own_cost || (has_free_physical && is_second);
        is_better
            .then(|| set(allowed.iter().filter(|core| cost(core) == best).map(|core| core.number)))
    }
}

/// Orders cores by the number of hardware threads of the same physical core before them, so that
/// the first threads of all physical cores come first.
fn physical_first(cores: &[Core]) -> Vec<Core> {
    let threads_before = |core: &Core| {
        let before = cores.iter().take_while(|other| other.number != core.number);
        before.filter(|other| other.physical == core.physical).count()
    };
    let mut ordered = cores.to_vec();
    ordered.sort_by_key(threads_before);
    ordered
}

fn set(cores: impl IntoIterator<Item = usize>) -> CpuSet {
    let mut set = CpuSet::new();
    cores.into_iter().for_each(|core| set.set(core));
    set
}

/// Returns the cores of a mask.
fn cores(mask: &CpuSet) -> impl Iterator<Item = Core> {
    machine().iter().copied().filter(|core| mask.is_set(core.number))
}

/// Returns the cores of this machine as Linux describes them, read once for each process.
fn machine() -> &'static [Core] {
    static MACHINE: OnceLock<Vec<Core>> = OnceLock::new();
    MACHINE.get_or_init(|| read(Path::new("/sys/devices/system/cpu")))
}

/// Reads the hardware threads and memory nodes of the cores. What Linux does not report counts as
/// separate cores of one node.
fn read(folder: &Path) -> Vec<Core> {
    let number = |name: &str, prefix: &str| name.strip_prefix(prefix)?.parse::<usize>().ok();
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };

    let core = |name: String| {
        let core = number(&name, "cpu")?;
        let folder = folder.join(&name);
        let siblings = fs::read_to_string(folder.join("topology/thread_siblings_list"));
        let first = siblings.ok().and_then(|list| {
            list.trim().split([',', '-']).next().and_then(|first| first.parse().ok())
        });
        let node = names(&folder).iter().find_map(|name| number(name, "node"));
        Some(Core { number: core, physical: first.unwrap_or(core), node: node.unwrap_or(0) })
    };
    let mut cores: Vec<Core> = names(folder).into_iter().filter_map(core).collect();
    cores.sort_unstable_by_key(|core| core.number);
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns cores 0 to 7: two nodes of two physical cores of two threads; thread `n + 1` belongs
    /// to the physical core of thread `n`.
    fn eight() -> Vec<Core> {
        (0..8).map(|number| Core { number, physical: number & !1, node: number / 4 }).collect()
    }

    fn plain(cores: usize) -> Vec<Core> {
        (0..cores).map(|number| Core { number, physical: number, node: 0 }).collect()
    }

    /// Returns the cores that are better than `here` for the last rank.
    fn better(allowed: Vec<Core>, here: usize, others: &[usize], slow: &[usize]) -> Vec<usize> {
        let others = others.iter().map(|&core| (core, true)).collect();
        let view = View { allowed, others, slow: slow.to_vec() };
        let set = view.better_than(here).unwrap_or_default();
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    }

    #[test]
    fn a_rank_leaves_a_core_that_it_shares_for_one_with_fewer_ranks() {
        let better = |here, others: &[usize]| better(plain(3), here, others, &[]);
        assert_eq!(better(0, &[0]), [1, 2]);
        assert_eq!(better(0, &[0, 1]), [2]);
        assert_eq!(better(0, &[1, 1]), [0; 0], "it is alone");
        assert_eq!(better(0, &[0, 1, 2]), [0; 0], "every core has two ranks, or would have");
        assert_eq!(better(2, &[2, 2, 1]), [0]);
        assert_eq!(better(2, &[2, 2, 1, 0]), [0, 1]);
        assert_eq!(better(7, &[7]), [0; 0], "it may not use this core");
    }

    #[test]
    fn looks_are_frequent_while_ranks_start_and_rare_where_moves_do_not_last() {
        let pauses = |first, looks: [bool; 4]| {
            let mut pause = first;
            looks.map(|is_uneven| {
                pause = next_pause(pause, is_uneven);
                pause.as_micros()
            })
        };
        assert_eq!(pauses(PAUSE_FIRST, [false; 4]), [200, 400, 800, 1600]);
        assert_eq!(pauses(PAUSE, [false; 4]), [10_000; 4]);
        let moved_once = [true, false, false, false];
        assert_eq!(pauses(PAUSE_FIRST, moved_once), [10_000; 4]);
        assert_eq!(pauses(PAUSE, [true, true, false, false]), [20_000, 40_000, 20_000, 10_000]);
        assert_eq!(pauses(PAUSE_MAX, [true; 4]), [1_000_000; 4]);
    }

    #[test]
    fn a_bound_rank_stays() {
        assert_eq!(better(plain(1), 0, &[0, 0], &[0]), [0; 0]);
    }

    #[test]
    fn physical_cores_come_before_threads_and_near_memory_before_far() {
        let better = |here, others: &[usize]| better(eight(), here, others, &[]);
        // A physical core of the same node is free.
        assert_eq!(better(0, &[0]), [2, 3]);
        assert_eq!(better(1, &[0]), [2, 3]);
        // Only the other node has free physical cores, for which a rank leaves a shared core but
        // not a thread.
        assert_eq!(better(0, &[0, 2]), [4, 5, 6, 7]);
        assert_eq!(better(1, &[0, 2]), [0; 0]);

        // Of two ranks on one physical core, the first one stays.
        let view = View { allowed: eight(), others: vec![(1, false)], slow: Vec::new() };
        assert_eq!(view.better_than(0), None);
    }

    #[test]
    fn ranks_that_share_cores_keep_away_from_those_of_other_processes() {
        let better = |cores, here, others: &[usize], slow: &[usize]| {
            better(plain(cores), here, others, slow)
        };
        assert_eq!(better(2, 0, &[0, 1, 1], &[0]), [1], "three ranks share core 1 already");
        assert_eq!(better(2, 1, &[1, 1, 1], &[0]), [0; 0]);
        assert_eq!(better(2, 0, &[0, 1, 1], &[0, 1]), [0; 0], "every core is slow");
        assert_eq!(better(2, 0, &[1], &[0]), [0; 0], "a slow core of its own");
        assert_eq!(better(3, 0, &[1], &[0]), [2], "a free one is better");
        assert_eq!(better(3, 0, &[0, 1], &[2]), [2], "a slow one is better than a shared one");
    }

    #[test]
    fn a_rank_binds_to_physical_cores_first() {
        let numbers: Vec<_> = physical_first(&eight()).iter().map(|core| core.number).collect();
        assert_eq!(numbers, [0, 2, 4, 6, 1, 3, 5, 7]);
    }

    #[test]
    fn a_thread_moves_and_keeps_its_mask() {
        let mask = sched_getaffinity(None).unwrap();
        let allowed: Vec<_> = cores(&mask).collect();
        let mut mover = Mover::new(Bind::Auto, 2);
        let here = rustix::thread::sched_getcpu();
        mover.view.others.push((here, true));

        assert_eq!(mover.look(Instant::now(), here), allowed.len() > 1);
        assert_eq!(cores(&sched_getaffinity(None).unwrap()).collect::<Vec<_>>(), allowed);
        assert_eq!(mover.moves, u64::from(allowed.len() > 1));
    }

    #[test]
    fn a_bound_thread_stays_on_its_core() {
        let thread = std::thread::spawn(|| {
            let allowed =
                physical_first(&cores(&sched_getaffinity(None).unwrap()).collect::<Vec<_>>());
            let mover = Mover::new(Bind::Core, 2);
            mover.bind(allowed.len() + 1);
            let expected = allowed[1 % allowed.len()].number;
            assert_eq!(rustix::thread::sched_getcpu(), expected);
            let mask = sched_getaffinity(None).unwrap();
            assert_eq!(cores(&mask).map(|core| core.number).collect::<Vec<_>>(), [expected]);
        });
        thread.join().unwrap();
    }

    #[test]
    fn the_cores_of_this_machine_are_read() {
        let machine = machine();
        let here = rustix::thread::sched_getcpu();
        let core = machine.iter().find(|core| core.number == here).unwrap();
        assert!(core.physical <= core.number);
        assert_eq!(read(Path::new("/no/such/folder")), []);
    }
}
