//! Groups over two fabrics: ranks as threads, one host fabric inside the node, another between nodes.

#[path = "tiers/support.rs"]
mod support;

#[path = "tiers/endings.rs"]
mod endings;
#[path = "tiers/gathers.rs"]
mod gathers;
#[path = "tiers/options.rs"]
mod options;
#[path = "tiers/reports.rs"]
mod reports;
#[path = "tiers/traces.rs"]
mod traces;
