//! Tests how ranks find each other, exchange values, and learn of losses.
//!
//! | module | shows |
//! | --- | --- |
//! | `attacks` | strangers and members with the secret neither stop a start nor fill the memory of rank 0, which is a process of its own |
//! | `deaths` | the death of a rank is told while a child of it lives; the ranks are processes, because they fork and end |
//! | `environment` | what launchers say, and what is wrong with it |
//! | `in_process` | the list of `checks` for ranks that are threads |
//! | `reopen` | groups open, end and open again at one address |
//! | `starts` | every rank names the one that is missing or has ended |
//! | `stopped_ranks` | nobody waits for a rank whose process is stopped; the ranks are processes |
//! | `tcp` | the list of `checks` for ranks that are processes, and how a group ends there |
//! | `tcp_secret` | only who knows the secret of the job joins, and others delay nobody |
//! | `tcp_start` | who is taken, who is refused, and who is missed |

mod attacks;
mod checks;
mod deaths;
mod environment;
mod in_process;
mod reopen;
mod starts;
mod stopped_ranks;
mod support;
mod tcp;
mod tcp_secret;
mod tcp_start;
