//! Selects the ranks of a scenario, starts them and reads their results, from the side of the test.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use peerlane_collectives::bootstrap::Secret;
use peerlane_collectives::bootstrap::tcp::HubOptions;
use peerlane_hal::Deadline;
use peerlane_tests::Outcome;
use peerlane_tests::processes::{Child, finish_all};

use crate::support::data::unexpected;

/// How long the ranks may take.
const PATIENCE: Duration = Duration::from_secs(250);

/// What a rank's memory is, and its fabric inside the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Host,
    Cuda,
    /// By streams of HIP.
    Rocm,
    /// By SDMA engines, which the host drives.
    Sdma,
}

/// What a group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Every algorithm, with blocks of all sizes and shapes.
    Gathers,
    /// Fallbacks are refused.
    Strict,
    /// The group is not opened, because ranks of one node differ.
    Disagrees,
    /// The last rank is killed.
    Killed,
}

macro_rules! words {
    ($type:ident { $($variant:ident = $word:literal),* }) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),* })
            }
        }

        impl FromStr for $type {
            type Err = ();

            fn from_str(text: &str) -> Result<Self, ()> {
                match text { $($word => Ok(Self::$variant),)* _ => Err(()) }
            }
        }
    };
}

words!(Kind { Host = "host", Cuda = "cuda", Rocm = "rocm", Sdma = "sdma" });
words!(Scenario {
    Gathers = "gathers", Strict = "strict", Disagrees = "disagrees", Killed = "killed"
});

/// Ranks on nodes, with memory of some kind each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processes {
    pub(crate) scenario: Scenario,
    pub(crate) ranks: &'static [(usize, Kind)],
}

impl Processes {
    pub(crate) fn nodes(self) -> usize {
        self.ranks.iter().map(|(node, _)| node + 1).max().unwrap_or(1)
    }

    pub(crate) fn name(self) -> String {
        let ranks: Vec<String> =
            self.ranks.iter().map(|(node, kind)| format!("{kind}{node}")).collect();
        format!("{}::{}", self.scenario, ranks.join("_"))
    }

    /// Plays it with blocks of these sizes; `start` starts this program as a rank on a node, with these values.
    pub(crate) fn run(
        self,
        hub: &str,
        blocks: &[usize],
        start: impl Fn(usize, &[(&str, String)]) -> Outcome<Child>,
    ) -> Outcome {
        let secret = Secret::random().map_err(unexpected)?;
        let options = HubOptions::default().secret(secret.clone());
        let hub = options.bind(hub, self.ranks.len()).map_err(unexpected)?;
        let blocks: Vec<String> = blocks.iter().map(ToString::to_string).collect();
        let nodes: Vec<String> = self.ranks.iter().map(|(node, _)| node.to_string()).collect();
        let start = |(rank, (node, kind)): (usize, &(usize, Kind))| {
            let values = [
                ("RANK", rank.to_string()),
                ("RANKS", self.ranks.len().to_string()),
                ("NODES", nodes.join(",")),
                ("BLOCKS", blocks.join(",")),
                ("KIND", kind.to_string()),
                ("HUB", hub.address().to_string()),
                ("SECRET", secret.expose().to_owned()),
                ("SCENARIO", self.scenario.to_string()),
            ];
            start(*node, &values)
        };
        let mut children: Vec<Child> =
            self.ranks.iter().enumerate().map(start).collect::<Outcome<_>>()?;
        let deadline = Deadline::after(PATIENCE);
        if self.scenario == Scenario::Killed {
            let mut victim = children.pop().expect("there are ranks");
            victim.read_until("under way", deadline)?;
            victim.kill()?;
        }
        finish_all(&mut children, deadline)
    }
}
