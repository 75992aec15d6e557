//! local driver
