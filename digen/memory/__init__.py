"""How much memory a run takes, before anything of it is started (`digen plan ALGORITHM --model MODEL`)."""
